"""Requests go on while the release is upgraded from the previous one, rolled back and uninstalled.

Pods may be replaced only if the new release asks for other pods. Here it does, as releases do: its engine has another
image. The engine itself is the present one under two names, because another build would take minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.bed import Bed
from cluster.demo import CHART, CRD, RELEASE, SYSTEM, install, uninstall_release
from cluster.release import CHART as CHART_PATH
from cluster.release import NotInHistoryError, extract
from support.deployments import ServedNamespace, manifest
from support.traffic import traffic
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

ROLLOUT = {"maxSurge": 1, "maxUnavailable": 0}
RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"memory": "2Gi", "cpu": "600m"}}


def schema(crd: Any) -> Any:
    """Return the schema of a CRD's only version."""
    (version,) = crd["spec"]["versions"]
    return version["schema"]


def schema_of(bed: Bed, chart: Path) -> Any:
    """Return the schema of the CRD in a chart."""
    return schema(yaml.safe_load(bed.helm("template", RELEASE, str(chart), "--show-only=templates/crd.yaml")))


def wait_for_schema(bed: Bed, expected: Any) -> None:
    """Wait until the cluster's CRD has this schema."""

    def served() -> Any:
        return schema(json.loads(bed.kubectl("get", "crd", CRD, "--output=json")))

    eventually(lambda: served() == expected, within=30, what="the CRD of the chart")


def template(namespace: ServedNamespace) -> Any:
    return namespace.get("deployments", "chat")["spec"]["template"]


def rollouts(namespace: ServedNamespace) -> int:
    """Return how many times pods of another template were started, the first ones included."""
    return int(namespace.get("deployments", "chat")["metadata"]["annotations"]["deployment.kubernetes.io/revision"])


def wait_for_image(namespace: ServedNamespace, image: str) -> set[str]:
    """Wait until only pods with this image run, and they are ready. Return their names."""

    def settled() -> set[str]:
        pods = namespace.pods()
        is_ready = namespace.condition("Ready").get("reason") == "AllReplicasReady"
        has_image = {pod["spec"]["containers"][0]["image"] for pod in pods} == {image}
        return {pod["metadata"]["name"] for pod in pods} if is_ready and has_image else set()

    return eventually(settled, within=120, what=f"ready pods of {image}", every=0.5)


def test_no_request_is_lost_by_an_upgrade_from_the_previous_release_and_back(
    bed: Bed, namespace: ServedNamespace, tmp_path: Path
) -> None:
    if bed.kind == "external":
        pytest.skip("the image of the previous release cannot be loaded into the cluster of FASTGEN_KUBECONFIG")
    try:
        tree = extract(tmp_path)
    except NotInHistoryError as error:
        pytest.skip(str(error))
    where = ("--namespace", SYSTEM, "--wait", "--timeout=600s")
    operators = bed.build_image("operator", tree=tree), bed.operator_image
    engines = (bed.rename_engine("previous") if bed.kind == "native" else bed.engine_image), bed.engine_image
    previous, present = (
        [f"--set=operator.image={operator}", f"--set=engine.image={engine}"]
        for operator, engine in zip(operators, engines, strict=True)
    )
    crds = schema_of(bed, tree.root / CHART_PATH), schema_of(bed, CHART)
    uninstall_release(bed)
    try:
        # As documented: the kept CRD may be one that `kubectl apply` has changed.
        owner = ("--take-ownership", "--force-conflicts")
        bed.helm("install", RELEASE, str(tree.root / CHART_PATH), *where, *owner, *previous)
        wait_for_schema(bed, crds[0])
        namespace.apply(manifest("chat", rollout=ROLLOUT, drainSeconds=300, resources=RESOURCES))
        first = wait_for_image(namespace, engines[0])
        with (
            traffic(namespace, bed.engine_image, "chat", "smollm2", clients=2, seconds=0) as short,
            traffic(namespace, bed.engine_image, "chat", "smollm2", clients=1, seconds=16) as long,
        ):
            old, before = template(namespace), rollouts(namespace)
            bed.helm("upgrade", RELEASE, str(CHART), *where, *present, "--reset-then-reuse-values")
            wait_for_schema(bed, crds[1])
            second = wait_for_image(namespace, engines[1])
            new = template(namespace)
            assert (second != first) == (new != old), "pods are replaced if, and only if, their template has changed"
            assert rollouts(namespace) == before + (new != old), "pods were replaced more than once"
            short.flows_on()
            assert short.failures() + long.failures() == [], "requests were lost during the upgrade"

            bed.helm("rollback", RELEASE, *where)
            wait_for_schema(bed, crds[0])
            third = wait_for_image(namespace, engines[0])
            assert template(namespace) == old
            assert rollouts(namespace) == before + 2 * (new != old), "pods were replaced more than once"
            short.flows_on()
            assert short.failures() + long.failures() == [], "requests were lost during the rollback"

            long.send_no_more()  # the open stream goes on while the operator is uninstalled
            uninstall_release(bed)
            assert bed.kubectl("get", "crd", CRD, "--output=name")
            short.flows_on()
            assert third <= {pod["metadata"]["name"] for pod in namespace.pods()}
            short.stop()
            long.wait_ended()
            assert short.failures() + long.failures() == [], "requests were lost after the operator was uninstalled"
    finally:
        install(bed, RELEASE, "--take-ownership")
