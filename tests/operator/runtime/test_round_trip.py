"""`helm test`: a resource is applied and read back with nothing but the rights of the chart's test."""

from __future__ import annotations

import pytest
import yaml
from kubernetes.config import new_client_from_config

from cluster.controlplane import ControlPlane
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.round_trip import RoundTripFailed, resource, round_trip
from harness.chart import Helm, operator_kubeconfig
from harness.probes import wait_rights
from harness.space import Space

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]


@pytest.fixture
def server(plane: ControlPlane, space: Space) -> ApiServer:
    """Requests of the test's pod, of a release that watches the namespace."""
    helm = Helm(plane.programs / "helm")
    objects = helm.tests("--set", f"watchNamespaces={{{space.name}}}")
    access = [obj for obj in objects if obj["kind"] != "Pod"]
    assert [obj["kind"] for obj in access] == ["ServiceAccount", "Role", "RoleBinding"]
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump_all(access))
    (pod,) = [obj for obj in objects if obj["kind"] == "Pod"]
    config = operator_kubeconfig(plane, pod["spec"]["serviceAccountName"])
    made = ApiServer(new_client_from_config(str(config)), Metrics(), 60.0)
    wait_rights(made, space.name, access[1]["rules"])
    return made


def test_the_operator_answers_an_applied_and_a_changed_resource(server: ApiServer, space: Space) -> None:
    found = round_trip(server, resource(space.name, "trip", None), 150)
    assert found["metadata"]["generation"] == found["status"]["observedGeneration"] == 2
    with pytest.raises(KubeError):
        space.get("fgd", "trip")


def test_without_an_operator_the_test_fails_and_leaves_nothing(server: ApiServer, space: Space) -> None:
    with pytest.raises(RoundTripFailed, match="check that an operator pod is ready"):
        round_trip(server, resource(space.name, "trip", "nobody"), 1)
    with pytest.raises(KubeError):
        space.get("fgd", "trip")
