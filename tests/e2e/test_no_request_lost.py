"""A steady stream of streaming requests through the Service, whatever is done to the deployment meanwhile."""

from __future__ import annotations

import json

import pytest

from cluster.bed import Bed
from cluster.demo import CHART, RELEASE, SYSTEM, install
from support.deployments import ServedNamespace, manifest
from support.traffic import Traffic, traffic
from support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def names(namespace: ServedNamespace) -> set[str]:
    return {pod["metadata"]["name"] for pod in namespace.pods()}


def change(namespace: ServedNamespace, **spec: object) -> None:
    namespace.kubectl("patch", "fgd", "chat", "--type", "merge", "--patch", json.dumps({"spec": spec}))


def wait_settled(namespace: ServedNamespace, count: int, without: set[str]) -> None:
    """Until so many pods are ready, and none of `without` is left, not even one that drains."""
    namespace.wait_condition("Ready", "True", "AllReplicasReady")

    def settled() -> bool:
        pods = namespace.items("pods", "--selector", "fastgen.dev/deployment=chat")
        left = {pod["metadata"]["name"] for pod in pods}
        return len(left) == count and not left & without

    eventually(settled, within=120, what=f"{count} pods and the end of {without}", every=0.5)


def restart_operator(bed: Bed) -> None:
    bed.kubectl("--namespace", SYSTEM, "rollout", "restart", f"deployment/{RELEASE}-operator")
    bed.kubectl("--namespace", SYSTEM, "rollout", "status", f"deployment/{RELEASE}-operator", "--timeout=120s")


def upgrade_operator(bed: Bed) -> None:
    """Other flags and another pod, as an upgrade of the release brings."""
    values = ["--reuse-values", "--set", "operator.resyncSeconds=7", "--set", "operator.logFormat=text"]
    bed.helm("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, *values, "--wait", "--timeout=120s")


def nothing_lost(stream: Traffic, during: str) -> None:
    stream.flows_on()
    assert stream.failures() == [], f"requests were lost during {during}"


def test_no_request_is_lost(bed: Bed, namespace: ServedNamespace) -> None:
    namespace.apply(manifest("chat", replicas=1, rollout={"maxSurge": 1, "maxUnavailable": 0}))
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    with traffic(namespace, bed.engine_image, "chat", "smollm2", clients=2) as stream:
        change(namespace, replicas=2)
        wait_settled(namespace, 2, set())
        nothing_lost(stream, "a scale-up")

        old = names(namespace)
        change(namespace, engine={"tokenBudget": 96})
        restart_operator(bed)
        wait_settled(namespace, 2, old)
        nothing_lost(stream, "a rollout with a pod more, and a restart of the operator in it")

        old = names(namespace)
        change(namespace, engine={"tokenBudget": 64}, rollout={"maxSurge": 0, "maxUnavailable": 1})
        wait_settled(namespace, 2, old)
        nothing_lost(stream, "a rollout with a pod less")

        old = names(namespace)
        try:
            upgrade_operator(bed)
            namespace.wait_condition("Ready", "True", "AllReplicasReady")
            nothing_lost(stream, "an upgrade of the operator")
            assert names(namespace) == old, "an upgrade of the operator has replaced engines"
        finally:
            install(bed)

        change(namespace, replicas=1)
        wait_settled(namespace, 1, set())
        nothing_lost(stream, "a scale-down")
        stream.stop()
        assert stream.failures() == []
