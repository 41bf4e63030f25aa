"""Children of optional kinds come and go with their CRDs, which here are the real ones; walls are put up again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.controlplane import ControlPlane
from harness.chart import Helm
from harness.definitions import INFERENCE_POOL_CRD, POD_MONITOR_CRD
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

DEFINITIONS = (POD_MONITOR_CRD, INFERENCE_POOL_CRD)
OPTIONAL = ("podmonitors.monitoring.coreos.com", "inferencepools.inference.networking.k8s.io")


def install(plane: ControlPlane) -> None:
    for definition in DEFINITIONS:
        plane.kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(definition.fetch()))
    for name in OPTIONAL:
        plane.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")


def uninstall(plane: ControlPlane) -> None:
    plane.kubectl("delete", "crd", *OPTIONAL, "--ignore-not-found")


@pytest.fixture
def bare(plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane, which has none of the optional kinds before and after."""
    yield plane
    uninstall(plane)


def made(space: Space, kind: str, name: str = "chat") -> Object:
    """The child, as soon as it is there."""
    found = eventually(lambda: space.get(kind, name), within=20, what=f"{kind}/{name}")
    assert found is not None
    return found


def versions(space: Space) -> dict[str, str]:
    return space.versions() | {kind: space.get(kind, "chat")["metadata"]["resourceVersion"] for kind in OPTIONAL}


def failures(operator: OperatorProcess) -> float:
    return operator.metrics()["fastgen_operator_reconcile_errors_total", ""]


def test_children_of_optional_kinds_come_and_go_with_their_crds(
    bare: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    operator.restart()
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    install(bare)
    asked = ("--set", "operator.podMonitor.enabled=true", "--set", "operator.networkPolicy.enabled=true")
    for kind in ("PodMonitor", "NetworkPolicy"):
        obj = Helm(bare.programs / "helm").one(kind, *asked)
        bare.kubectl("apply", "--dry-run=server", "--filename", "-", stdin=json.dumps(obj))
    assert made(space, OPTIONAL[0])["spec"]["podTargetLabels"] == ["fastgen.dev/deployment"]
    assert made(space, OPTIONAL[1])["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    space.settled()
    before, writes = versions(space), operator.writes()
    operator.let_resyncs_pass(4)
    assert (versions(space), operator.writes()) == (before, writes)
    operator.restart()
    operator.let_resyncs_pass(3)
    assert (versions(space), operator.writes()) == (before, {})
    uninstall(bare)
    eventually(
        lambda: operator.log.read_text().rstrip().count("has: none") >= 1, within=20, what="the end of the kinds"
    )
    operator.let_resyncs_pass(3)
    assert failures(operator) == 0
    assert space.condition("Ready")["status"] == "True"
    install(bare)
    for kind in OPTIONAL:
        made(space, kind)


def test_what_somebody_else_made_of_an_optional_kind_is_left_alone(
    bare: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    install(bare)
    theirs = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "chat"},
        "spec": {
            "selector": {"matchLabels": {"fastgen.dev/deployment": "chat"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "my-picker", "port": {"number": 9002}},
        },
    }
    space.apply(theirs)
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    made(space, OPTIONAL[0])
    operator.let_resyncs_pass(2)
    pool = space.get(OPTIONAL[1], "chat")
    assert pool["spec"]["endpointPickerRef"]["name"] == "my-picker"
    assert "ownerReferences" not in pool["metadata"]


def test_a_hole_made_by_hand_in_the_network_policy_is_closed(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource())
    spec = made(space, "networkpolicy")["spec"]
    space.patch("networkpolicy/chat", {"spec": {"ingress": [*spec["ingress"], {}]}})
    eventually(lambda: space.get("networkpolicy", "chat")["spec"] == spec, within=20, what="the hole closed")
    space.patch("networkpolicy/chat", {"spec": {"podSelector": {"matchLabels": {"nobody": "at-all"}}}})
    eventually(lambda: space.get("networkpolicy", "chat")["spec"] == spec, within=20, what="the pods selected again")


def test_a_replica_that_is_needed_is_not_evicted_and_one_that_may_go_is(
    space: Space, operator: OperatorProcess
) -> None:
    del operator
    space.apply(resource(replicas=2, disruption={"minAvailable": 1}))
    space.make_ready(count=2)
    eventually(
        lambda: space.get("pdb", "chat")["status"].get("disruptionsAllowed") == 1, within=30, what="one that may go"
    )
    budget = space.get("pdb", "chat")
    assert budget["spec"]["minAvailable"] == 1
    assert budget["status"]["expectedPods"] == 2
    space.patch("fgd/chat", {"spec": {"replicas": 1}})
    eventually(lambda: space.get("pdb", "chat")["spec"].get("maxUnavailable") == 1, within=20, what="a drain may go on")
    assert "minAvailable" not in space.get("pdb", "chat")["spec"]
