"""A deployment at zero replicas, against a real API server: held requests, evidence of idleness, restarts, names.

The gateway's pods are stand-ins that answer /demand. tests/e2e/test_gateway.py has the real gateway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from harness.chart import SYSTEM, operator_kubeconfig
from harness.engines import FakeEngine
from harness.loopback import LOOPBACK
from harness.process import SCRAPE_SECONDS, OperatorProcess
from harness.short_lease import SHORT_LEASE
from harness.space import Space, resource, running
from harness.standin_gateway import StandInGateway
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

# One address per pod of a test run; other modules use other networks.
IDLE = 10

Start = Callable[..., OperatorProcess]
Gateways = Callable[..., StandInGateway]


def sleeper(name: str = "chat", **autoscaling: Any) -> Object:
    """Return a FastGenDeployment that may have no replica."""
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": IDLE, **autoscaling}
    return resource(name, autoscaling=scaling, gateway={"expose": True})


@pytest.fixture
def start(plane: ControlPlane, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Start operators of the test's namespace, in which they also look for the gateway."""

    def start(*election: str) -> OperatorProcess:
        place = ("--namespace", space.name, "--gateway-namespace", space.name)
        log = tmp_path / f"operator{len(operators)}.log"
        operator = OperatorProcess(operator_kubeconfig(plane), log, place)
        operator.election = election or operator.election
        operators.append(operator)
        operator.start()
        return operator

    return start


@pytest.fixture
def gateways(space: Space) -> Iterator[Gateways]:
    """Create pods of the gateway, each with a stand-in behind its address."""
    made: list[StandInGateway] = []

    def make(**says: Any) -> StandInGateway:
        gateway = StandInGateway(next(LOOPBACK), **says).start()
        made.append(gateway)
        name = f"gateway-{len(made)}"
        labels = {"app.kubernetes.io/name": "fastgen-gateway"}
        context = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {"name": "picker", "image": "gateway:test", "securityContext": context}
        space.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels},
                "spec": {"containers": [container]},
            }
        )
        at = {"podIP": gateway.address, "podIPs": [{"ip": gateway.address}]}
        space.patch(f"pod/{name}", {"status": {**running(ready=True), **at}}, "status")
        return gateway

    yield make
    for gateway in made:
        gateway.close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine without work."""
    made = FakeEngine(next(LOOPBACK), running=0.0).start()
    yield made
    made.close()


def replicas(space: Space, name: str = "chat") -> int | None:
    found = [each for each in space.items("deployments") if each["metadata"]["name"] == name]
    return found[0]["spec"]["replicas"] if found else None


def run(space: Space, engine: FakeEngine) -> None:
    """Let the only pod be ready, with the engine behind it."""
    (pod,) = space.wait_pods(1)
    status = {**running(ready=True), "podIP": engine.address, "podIPs": [{"ip": engine.address}]}
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def asleep(space: Space) -> None:
    """Wait until the resource is at zero, and says so."""
    eventually(lambda: replicas(space) == 0, within=40, what="no replica")
    space.wait_condition("Ready", "True", "ScaledToZero")


def wake(space: Space, gateway: StandInGateway) -> None:
    """Hold a request, and wait until the Deployment has a replica."""
    gateway.held[f"{space.name}/chat"] = 1
    eventually(lambda: replicas(space) == 1, within=20, what="a replica", every=0.05)


def let_be_asked(gateway: StandInGateway, times: int) -> None:
    target = gateway.asked + times
    eventually(lambda: gateway.asked >= target, within=30, what=f"{times} polls")


def test_a_held_request_starts_a_replica_at_once_and_an_idle_one_is_removed(
    space: Space, start: Start, gateways: Gateways, engine: FakeEngine
) -> None:
    gateway = gateways(held={f"{space.name}/chat": 0})
    start()
    space.apply(sleeper())
    asleep(space)
    assert space.condition("ScalingActive")["status"] in ("True", "Unknown")
    eventually(lambda: gateway.asked > 2, within=20, what="polls")
    wake(space, gateway)
    space.wait_condition("Ready", "False")
    run(space, engine)
    gateway.held[f"{space.name}/chat"] = 0
    space.wait_condition("Ready", "True", "AllReplicasReady")
    asleep(space)
    recorded = space.get("fgd", "chat")["status"]["autoscaling"]
    assert [step["reason"] for step in recorded["history"]] == ["Idle", "RequestsHeld"]
    assert recorded["message"] == f"0 replicas: no request for {IDLE} s"
    before = space.settled()
    let_be_asked(gateway, 8)
    assert space.versions() == before, "writes at zero"


def test_a_gateway_that_does_not_answer_or_is_gone_never_removes_the_last_replica(
    space: Space, start: Start, gateways: Gateways, engine: FakeEngine
) -> None:
    talks = gateways(held={f"{space.name}/chat": 1})
    start()
    space.apply(sleeper())
    eventually(lambda: replicas(space) == 1, within=30, what="a replica")
    run(space, engine)
    hangs = gateways(answers=False)
    talks.held[f"{space.name}/chat"] = 0
    space.wait_condition("Ready", "True", "AllReplicasReady")

    def stays() -> None:
        target = engine.scrapes + 2 * IDLE / SCRAPE_SECONDS
        eventually(lambda: engine.scrapes >= target or replicas(space) == 0, within=60, what="twice the idle time")
        assert replicas(space) == 1

    stays()
    # The pods do not vanish at the same time.
    talks.answers = False
    space.kubectl("delete", "pods", "--selector=app.kubernetes.io/name=fastgen-gateway", "--now")
    stays()
    space.wait_condition("ScalingActive", "False", "GatewayUnreachable")
    assert hangs.asked >= 1


def test_nothing_held_is_lost_while_the_operator_restarts(space: Space, start: Start, gateways: Gateways) -> None:
    gateway = gateways(held={f"{space.name}/chat": 0})
    operator = start()
    space.apply(sleeper())
    asleep(space)
    before = space.settled()
    operator.restart()
    let_be_asked(gateway, 4)
    assert space.versions() == before, "a restart is written down"
    operator.kill()
    gateway.held[f"{space.name}/chat"] = 7
    operator.start()
    eventually(lambda: replicas(space) == 1, within=20, what="a replica")


def test_nothing_held_is_lost_while_the_leader_changes(
    plane: ControlPlane, space: Space, start: Start, gateways: Gateways
) -> None:
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    election = ("--lease-namespace", SYSTEM, *SHORT_LEASE)
    gateway = gateways(held={f"{space.name}/chat": 0})
    first = start(*election)
    eventually(first.leads, within=20, what="a leader")
    second = start(*election)
    space.apply(sleeper())
    asleep(space)
    first.kill()
    gateway.held[f"{space.name}/chat"] = 7
    eventually(second.leads, within=60, what="the next leader")
    eventually(lambda: replicas(space) == 1, within=20, what="a replica")


def test_the_younger_of_two_resources_with_a_model_name_says_so_until_the_older_is_gone(
    space: Space, start: Start, gateways: Gateways
) -> None:
    gateways(held={f"{space.name}/first": 0, f"{space.name}/second": 0})
    operator = start()

    def named(name: str) -> Object:
        made = sleeper(name)
        made["spec"]["model"]["servedName"] = "llama"
        return made

    space.apply(named("first"))
    space.wait_condition("Exposed", "True", "ModelRouted", name="first")
    time.sleep(1.1)  # creation times have whole seconds
    space.apply(named("second"))
    space.wait_condition("Exposed", "False", "ModelNameTaken", name="second")
    assert f"{space.name}/first" in space.condition("Exposed", name="second")["message"]
    space.wait_condition("Ready", "True", "ScaledToZero", name="second")
    operator.restart()
    operator.let_resyncs_pass(2)
    assert space.condition("Exposed", name="first")["status"] == "True"
    space.kubectl("delete", "fgd", "first")
    space.wait_condition("Exposed", "True", "ModelRouted", name="second")
