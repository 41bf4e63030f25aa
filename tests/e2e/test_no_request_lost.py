"""No streaming request through the Service is lost during scale-ups, rollouts, upgrades and scale-downs.

Clients keep their connections, as pools do. Short streams show that requests are always accepted. Long streams outlast
the 15 s between a pod's deletion and its SIGTERM, so they still run when the engine starts to drain.
"""

from __future__ import annotations

import json
import re

import pytest

from cluster.bed import Bed
from cluster.commands import CommandError
from cluster.demo import CHART, RELEASE, SYSTEM, install
from support.deployments import ServedNamespace, manifest
from support.traffic import Traffic, traffic
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

# Duration of a long stream. It takes longer while starting engines use the CPU.
LONG_SECONDS = 16
# The streams must last, not be fast: without a limit, they would keep the whole machine busy. The request is small, so
# that draining pods leave room for those that replace them.
RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"memory": "2Gi", "cpu": "600m"}}


def names(namespace: ServedNamespace) -> set[str]:
    return {pod["metadata"]["name"] for pod in namespace.pods()}


def change(namespace: ServedNamespace, **spec: object) -> None:
    namespace.kubectl("patch", "fgd", "chat", "--type", "merge", "--patch", json.dumps({"spec": spec}))


def streams_at_sigterm(namespace: ServedNamespace, pod: str) -> int:
    """Return the open requests of a pod at the start of its drain; 0 before that and after the pod's deletion."""
    try:
        log = namespace.kubectl("logs", pod)
    except CommandError:
        return 0
    found = re.search(r"draining: (\d+) open requests", log)
    return 0 if found is None else int(found[1])


def wait_replaced(namespace: ServedNamespace, count: int, old: set[str]) -> set[str]:
    """Wait until `count` pods are ready that are not in `old`, which may still drain, and return their names."""

    def replaced() -> set[str]:
        serving = names(namespace)
        is_ready = namespace.condition("Ready").get("reason") == "AllReplicasReady"
        return serving if is_ready and len(serving) == count and not serving & old else set()

    return eventually(replaced, within=400, what=f"{count} ready pods in place of {old}", every=0.5)


def wait_settled(namespace: ServedNamespace, count: int, without: set[str]) -> int:
    """Wait until `count` pods are ready and all pods in `without` are deleted.

    Returns the number of open requests of the deleted pods at their SIGTERM. A pod with open requests exists until they
    end, so polling does not miss it.
    """
    draining: dict[str, int] = {}

    def settled() -> bool:
        pods = namespace.items("pods", labels="fastgen.dev/deployment=chat")
        for pod in pods:
            name = pod["metadata"]["name"]
            if pod["metadata"].get("deletionTimestamp") and not draining.get(name):
                draining[name] = streams_at_sigterm(namespace, name)
        left = {pod["metadata"]["name"] for pod in pods}
        ready = namespace.condition("Ready")
        is_ready = (ready.get("status"), ready.get("reason")) == ("True", "AllReplicasReady")
        return is_ready and len(left) == count and not left & without

    eventually(settled, within=400, what=f"{count} pods and the end of {without}", every=0.5)
    return sum(draining.values())


def restart_operator(bed: Bed) -> None:
    bed.kubectl("--namespace", SYSTEM, "rollout", "restart", f"deployment/{RELEASE}-operator")
    bed.kubectl("--namespace", SYSTEM, "rollout", "status", f"deployment/{RELEASE}-operator", "--timeout=600s")


def upgrade_operator(bed: Bed) -> None:
    """Change the operator's flags, which replaces its pod as an upgrade of the release does."""
    values = ["--reuse-values", "--set", "operator.resyncSeconds=7", "--set", "operator.logFormat=text"]
    bed.helm("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM, *values, "--wait", "--timeout=600s")


def nothing_lost(short: Traffic, long: Traffic, during: str) -> None:
    short.flows_on()
    assert short.failures() + long.failures() == [], f"requests were lost during {during}"


def test_no_request_is_lost(bed: Bed, namespace: ServedNamespace) -> None:
    """Each change but the first begins while the pods of the previous one drain."""
    rollout = {"maxSurge": 1, "maxUnavailable": 0}
    namespace.apply(manifest("chat", replicas=1, rollout=rollout, drainSeconds=300, resources=RESOURCES))
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    image, drained = bed.engine_image, 0
    with (
        traffic(namespace, image, "chat", "smollm2", clients=1, seconds=0) as short,
        traffic(namespace, image, "chat", "smollm2", clients=2, seconds=LONG_SECONDS) as long,
    ):
        old = names(namespace)
        change(namespace, engine={"tokenBudget": 96})
        restart_operator(bed)
        wait_replaced(namespace, 1, old)
        nothing_lost(short, long, "a rollout with a surge pod, and a restart of the operator during it")

        change(namespace, replicas=2)
        drained += wait_settled(namespace, 2, old)
        nothing_lost(short, long, "a scale-up")

        old = names(namespace)
        change(namespace, engine={"tokenBudget": 64}, rollout={"maxSurge": 0, "maxUnavailable": 1})
        new = wait_replaced(namespace, 2, old)
        nothing_lost(short, long, "a rollout with an unavailable pod")

        try:
            upgrade_operator(bed)
            namespace.wait_condition("Ready", "True", "AllReplicasReady")
            drained += wait_settled(namespace, 2, old)
            nothing_lost(short, long, "an upgrade of the operator")
            assert names(namespace) == new, "the upgrade of the operator replaced engine pods"
            change(namespace, replicas=1)
            long.send_no_more()
        finally:
            install(bed)
        drained += wait_settled(namespace, 1, set())
        nothing_lost(short, long, "a scale-down, and a change of the operator during it")
        short.stop()
        long.wait_ended()
        assert short.failures() + long.failures() == []
    assert drained > 0, "no stream was open when its pod got SIGTERM, so the test did not cover drains"
