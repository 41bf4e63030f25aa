"""A new revision that is tried on a share of the requests, against a real API server and its Deployment controller.

The pods have no kubelet: engines at addresses of their own stand in for them. The tests set the time of a step back
instead of waiting for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import CommandError
from cluster.controlplane import ControlPlane
from harness.chart import SYSTEM, operator_kubeconfig
from harness.engines import FakeEngine
from harness.loopback import LOOPBACK
from harness.process import OperatorProcess
from harness.short_lease import SHORT_LEASE
from harness.space import Space, resource, running
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

STEPS = [{"percent": 40, "minutes": 5}, {"percent": 60, "minutes": 5}]

Start = Callable[..., OperatorProcess]
Engines = Callable[[list[Object]], list[FakeEngine]]


def tried(budget: int = 128, **spec: Any) -> Object:
    """Return a FastGenDeployment with a canary; another token budget is another revision."""
    engine = {"device": "cpu", "tokenBudget": budget, "maxSequences": 64}
    rollout = {"canary": {"steps": STEPS}}
    return resource(**{"replicas": 2, "engine": engine, "gateway": {"expose": True}, "rollout": rollout, **spec})


@pytest.fixture
def start(plane: ControlPlane, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Start operators of the test's namespace, with a gateway."""

    def start(*election: str, gateway: bool = True) -> OperatorProcess:
        place = ("--namespace", space.name, *(("--gateway-namespace", space.name) if gateway else ()))
        operator = OperatorProcess(operator_kubeconfig(plane), tmp_path / f"operator{len(operators)}.log", place)
        operator.election = election or operator.election
        operators.append(operator)
        operator.start()
        return operator

    return start


@pytest.fixture
def engines(space: Space) -> Iterator[Engines]:
    """Let pods be ready, each with an engine behind its address that finishes requests."""
    made: list[FakeEngine] = []

    def make(pods: list[Object]) -> list[FakeEngine]:
        found = []
        for pod in pods:
            engine = FakeEngine(next(LOOPBACK), request_rate=200.0).start()
            found.append(engine)
            status = {**running(ready=True), "podIP": engine.address, "podIPs": [{"ip": engine.address}]}
            space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")
        made.extend(found)
        return found

    yield make
    for engine in made:
        engine.close()


def canary(space: Space) -> dict[str, Any]:
    found: dict[str, Any] = space.get("fgd", "chat").get("status", {}).get("canary", {})
    return found


def canary_pods(space: Space, number: int) -> list[Object]:
    """Wait for so many pods of the canary, and return them."""

    def poll() -> list[Object] | None:
        found = space.pods("chat_canary")
        return found if len(found) == number else None

    pods = eventually(poll, within=30, what=f"{number} pods of the canary")
    assert pods is not None
    return pods


def wait_canary(space: Space, **fields: Any) -> dict[str, Any]:
    """Wait until `status.canary` has these values."""
    eventually(lambda: canary(space).items() >= fields.items(), within=30, what=f"status.canary with {fields}")
    return canary(space)


def wait_gone(space: Space) -> None:
    """Wait until nothing of the canary is left but its NetworkPolicy."""

    def gone() -> bool:
        names = [each["metadata"]["name"] for each in space.items("deployments,services")]
        return names == ["chat", "chat"] and not space.pods("chat_canary")

    eventually(gone, within=30, what="no canary")


def end_step(space: Space) -> None:
    """Let the time of the step have passed."""
    assert "measuredSince" in canary(space)
    space.patch("fgd/chat", {"status": {"canary": {"measuredSince": minutes_ago(20)}}}, "status")


def minutes_ago(minutes: int) -> str:
    return (datetime.now(UTC) - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def serve(space: Space, engines: Engines) -> tuple[Object, list[str]]:
    """Let the first revision serve; return its template and the names of its pods."""
    space.apply(tried())
    engines(space.wait_pods(2))
    space.wait_condition("Ready", "True")
    assert canary(space) == {}, "there is nothing to compare the first revision with"
    return space.template(), sorted(pod["metadata"]["name"] for pod in space.pods("chat"))


def budget_of(template: Object) -> str:
    arguments: list[str] = template["spec"]["containers"][0]["args"]
    return arguments[arguments.index("--token-budget") + 1]


def test_a_good_revision_passes_its_steps_and_replaces_the_pods(space: Space, start: Start, engines: Engines) -> None:
    start()
    old, names = serve(space, engines)
    space.apply(tried(256))
    first = canary_pods(space, 1)
    assert space.template() == old
    space.wait_condition("Progressing", "True", "CanaryRunning")
    assert canary(space)["percent"] == 0
    engines(first)
    wait_canary(space, step=1, percent=40)
    assert sorted(pod["metadata"]["name"] for pod in space.pods("chat")) == names
    (slice_,) = space.items("endpointslices", labels="kubernetes.io/service-name=chat-canary")
    assert slice_["metadata"]["labels"]["fastgen.dev/deployment"] == "chat", "by which the gateway finds it"
    end_step(space)
    second = wait_canary(space, step=2)
    assert second["percent"] == 40, "until there are more pods"
    engines([pod for pod in canary_pods(space, 2) if pod["metadata"]["name"] != first[0]["metadata"]["name"]])
    wait_canary(space, step=2, percent=60)
    assert space.template() == old
    end_step(space)
    eventually(lambda: budget_of(space.template()) == "256", within=30, what="the new template")
    assert canary(space)["outcome"] == "Promoted"
    space.finish_rollout(count=2)
    wait_gone(space)
    space.wait_condition("Progressing", "True", "RolloutComplete")
    eventually(lambda: canary(space) == {}, within=20, what="no canary in the status")
    space.settled()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"error_share": 0.5}, "CanaryFailsRequests"), ({"gap_seconds": 0.05}, "CanaryTooSlow")],
    ids=["errors", "slow"],
)
def test_a_bad_revision_is_rolled_back_and_not_tried_again(
    space: Space, start: Start, engines: Engines, fault: dict[str, float], reason: str
) -> None:
    operator = start()
    old, names = serve(space, engines)
    space.apply(tried(256))
    (engine,) = engines(canary_pods(space, 1))
    wait_canary(space, percent=40)
    for name, value in fault.items():
        setattr(engine, name, value)
    found = wait_canary(space, outcome="RolledBack", percent=0)
    assert found["reason"] == reason
    wait_gone(space)
    space.wait_condition("Progressing", "False", reason)
    space.wait_condition("Ready", "False", reason)
    assert space.template() == old
    space.wait_condition("ReplicasUniform", "True", "NoStragglers")  # the speed is measured, which is written once
    before = space.settled()
    operator.restart()
    operator.let_resyncs_pass(3)
    assert space.versions() == before, "neither tried again nor written again"
    assert sorted(pod["metadata"]["name"] for pod in space.pods("chat")) == names, "no pod was replaced"
    space.apply(tried())
    space.wait_condition("Ready", "True")
    assert canary(space) == {}
    space.apply(tried(512))
    canary_pods(space, 1)


def test_a_crash_of_a_pod_that_serves_is_a_rollback(space: Space, start: Start, engines: Engines) -> None:
    start()
    serve(space, engines)
    space.apply(tried(256))
    (pod,) = canary_pods(space, 1)
    engines([pod])
    wait_canary(space, percent=40)
    ended = {"exitCode": 139, "reason": "Error", "startedAt": minutes_ago(60), "finishedAt": minutes_ago(-1)}
    crashed = {"restartCount": 1, "lastState": {"terminated": ended}}
    space.set_pod(pod, ready=False, container=crashed)
    found = wait_canary(space, outcome="RolledBack", reason="CanaryCrashed")
    assert "ended with exit code 139" in found["message"]
    wait_gone(space)


def test_a_step_goes_on_after_a_restart_and_with_another_leader(
    plane: ControlPlane, space: Space, start: Start, engines: Engines
) -> None:
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    election = ("--lease-namespace", SYSTEM, *SHORT_LEASE)
    first = start(*election)
    eventually(first.leads, within=20, what="a leader")
    second = start(*election)
    serve(space, engines)
    space.apply(tried(256))
    (engine,) = engines(canary_pods(space, 1))
    before = wait_canary(space, percent=40)
    first.kill()
    eventually(second.leads, within=60, what="the next leader")
    scraped = engine.scrapes + 3
    eventually(lambda: engine.scrapes >= scraped, within=30, what="its scrapes")
    assert canary(space) == before, "the same step, since the same time"
    engine.error_share = 0.5
    wait_canary(space, outcome="RolledBack", reason="CanaryFailsRequests")
    wait_gone(space)


def test_the_previous_spec_or_no_canary_ends_a_trial(space: Space, start: Start, engines: Engines) -> None:
    start()
    old, names = serve(space, engines)
    space.apply(tried(256))
    engines(canary_pods(space, 1))
    wait_canary(space, percent=40)
    space.apply(tried())
    wait_gone(space)
    space.wait_condition("Progressing", "True", "RolloutComplete")
    assert canary(space) == {}
    assert (budget_of(space.template()), space.template()["metadata"]) == (budget_of(old), old["metadata"])
    assert sorted(pod["metadata"]["name"] for pod in space.pods("chat")) == names, "no pod was replaced"
    space.apply(tried(256))
    canary_pods(space, 1)
    space.apply(tried(256, rollout={}))
    eventually(lambda: budget_of(space.template()) == "256", within=30, what="the new template")
    wait_gone(space)


def test_without_a_gateway_the_pods_stay_and_the_condition_says_what_to_do(
    space: Space, start: Start, engines: Engines
) -> None:
    start(gateway=False)
    old, _ = serve(space, engines)
    space.apply(tried(256))
    space.wait_condition("Progressing", "False", "CanaryWithoutGateway")
    assert "install its chart with gateway.enabled" in space.condition("Progressing")["message"]
    assert space.template() == old
    with pytest.raises(CommandError, match=r"canary requires spec\.gateway\.expose"):
        space.apply(tried(256, gateway={"expose": False}))
