"""300 resources of random hostile shapes beside a good one: it is reconciled, healed and scaled as if it were alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import FASTGEN
from harness.chart import CHART, operator_kubeconfig
from harness.engines import FakeEngine
from harness.fluid import PROMPT_RATE
from harness.hostile_engines import FAULTS
from harness.hostile_tenant import Tenant
from harness.loopback import LOOPBACK
from harness.process import OperatorProcess
from harness.space import Space, resource, running
from support.forking import Forked, fork_server
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.slow, pytest.mark.usefixtures("unattended")]

RESOURCES = 300
SEED = 20261125
LIMIT = yaml.safe_load((CHART / "values.yaml").read_text())["operator"]["resources"]["limits"]["memory"]
# The backoff and intervals of the chart; those of other tests retry each fault all the time.
PATIENCE = ("--retry-seconds", "1", "--retry-limit-seconds", "60", "--resync-seconds", "30", "--relist-seconds", "300")
# Deleted in turn: the operator restores one child five times within an hour at once, then with a backoff.
CHILDREN = ("service", "networkpolicy", "poddisruptionbudget")

Times = dict[str, float]


@pytest.fixture
def operator(plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[OperatorProcess]:
    started = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ("--namespace", space.name, *PATIENCE))
    started.start()
    yield started
    started.abandon()


class Good:
    """The resource `chat`, with an engine behind each of its pods. They have more load than any maximum allows for."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.engines: dict[str, FakeEngine] = {}
        self.most = 1
        space.apply(resource(engine={"device": "cpu", "interTokenTarget": 200}, autoscaling={"maxReplicas": 1}))
        eventually(self.is_ready, within=60, what="the good resource", every=0.1)
        space.wait_condition("ScalingActive", "True", "Active")

    def is_ready(self) -> bool:
        """Make the pods ready that are there, and return whether the resource is, with as many as it may have."""
        for pod in self.space.pods():
            name = pod["metadata"]["name"]
            if name not in self.engines:
                engine = FakeEngine(next(LOOPBACK), prompt_rate=0.1 * PROMPT_RATE, backlog=60_000).start()
                self.engines[name] = engine
                serve_pod(self.space, pod, engine.address)
        reason = self.space.condition("Ready").get("reason")
        return reason == "AllReplicasReady" and len(self.engines) == self.most

    def times(self) -> Times:
        """Return the seconds until the operator observes an edit, adds a replica, sees it ready, restores a child."""
        self.most += 1
        self.space.patch("fgd/chat", {"spec": {"autoscaling": {"maxReplicas": self.most}}})
        began = time.monotonic()
        edited = until(lambda: self.space.condition("Ready"), "the edit")
        until(lambda: self.space.get("deployment", "chat")["spec"]["replicas"] == self.most, "another replica")
        scaled = time.monotonic() - began
        ready = until(self.is_ready, "the replicas to be ready")
        child = CHILDREN[self.most % len(CHILDREN)]
        uid = self.space.get(child, "chat")["metadata"]["uid"]
        self.space.kubectl("delete", child, "chat", "--wait=false")
        healed = until(lambda: self.space.get(child, "chat")["metadata"]["uid"] != uid, f"the restored {child}")
        return {"edited": edited, "scaled": scaled, "ready": ready, "healed": healed}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def until(poll: Callable[[], object], what: str) -> float:
    """Wait for a condition, and return the seconds it took."""
    began = time.monotonic()
    eventually(poll, within=60, what=what, every=0.1)
    return time.monotonic() - began


def serve_pod(space: Space, pod: Object, address: str) -> None:
    """Make the pod ready at the address."""
    status = {**running(ready=True), "podIP": address, "podIPs": [{"ip": address}]}
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def serve_hostile_pods(space: Space, log: Path) -> Forked:
    """Put hostile engines behind all pods of the tenant. Return their process."""
    names = [(pod, pod["metadata"]["labels"]["fastgen.dev/deployment"]) for pod in space.items("pods")]
    served = [(pod, name, next(LOOPBACK)) for pod, name in names if name != "chat"]
    assert len(served) >= len(FAULTS), "an engine of each fault"
    arguments = [f"{address}={name}" for _, name, address in served]
    process = fork_server("harness.hostile_engines").start(arguments, log)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: serve_pod(space, each[0], each[2]), served))
    return process


def failed_scrapes(operator: OperatorProcess) -> set[str]:
    """Return the reasons for which scrapes failed since the operator's start."""
    name = "fastgen_operator_scrape_failures_total"
    return {reason for (found, reason), number in operator.metrics().items() if found == name and number}


def of_the_class(space: Space) -> set[str]:
    """Return the names of the resources of the operator's class."""
    _, found = space.server.list(FASTGEN.path(space.name), [])
    return {each["metadata"]["name"] for each in found if "operatorClass" not in each["spec"]}


def with_conditions(operator: OperatorProcess) -> set[str]:
    """Return the names of the resources with conditions, from the metrics: the list itself has tens of megabytes."""
    shown = (labels for name, labels in operator.metrics() if name == "fastgen_operator_condition")
    return {labels.partition("/")[0] for labels in shown}


def release(space: Space) -> None:
    """Remove the tenant's finalizers, which would keep the namespace."""
    for obj in space.items("fgd"):
        if obj["metadata"].get("finalizers"):
            space.patch(f"fgd/{obj['metadata']['name']}", {"metadata": {"finalizers": None}})


@pytest.fixture
def good(space: Space, operator: OperatorProcess) -> Iterator[Good]:
    del operator
    found = Good(space)
    yield found
    found.close()


@pytest.fixture
def tenant(space: Space) -> Iterator[Tenant]:
    yield Tenant(space, SEED)
    release(space)


def test_a_tenant_with_300_hostile_resources_delays_nobody(
    space: Space, operator: OperatorProcess, tenant: Tenant, good: Good, tmp_path: Path
) -> None:
    measured: dict[str, list[Times]] = {"alone": [good.times() for _ in range(2)], "beside the writes": []}
    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            storing = threads.submit(tenant.store, RESOURCES // 3)
            measured["beside the writes"].append(good.times())
            storing.result()
    assert tenant.answers[201] == RESOURCES
    engines = serve_hostile_pods(space, tmp_path / "engines")
    try:
        attacks = {"TooLarge", "TimedOut", "NotMetrics", "BadValue", "OtherModel"}
        eventually(lambda: attacks <= failed_scrapes(operator), within=60, what="scrapes of the hostile engines")
        measured["beside the engines"] = [good.times() for _ in range(2)]
        names = of_the_class(space)
        eventually(lambda: not names - with_conditions(operator), within=60, what="a status of every resource", every=1)
        peaks = [operator.peak_memory()]
        assert operator.stop() == 0
        operator.start()
        measured["after a restart"] = [good.times() for _ in range(2)]
        peaks.append(operator.peak_memory())
        assert operator.is_healthy()
        assert operator.stop() == 0
    finally:
        engines.kill()
    for name in measured["alone"][0]:
        normal = max(each[name] for each in measured["alone"])
        slowest = max(each[name] for found in measured.values() for each in found)
        # The autoscaler adds at most four replicas within 15 s, and the machine also does the tenant's work.
        assert slowest < max(30, 10 * normal), (name, normal, measured)
    assert max(peaks) < int(LIMIT.removesuffix("Mi")) << 20
    assert "Traceback" not in operator.log.read_text()
