"""Operators on machines whose clock is wrong, or changes: nothing is too early, too late or undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import LEASE
from harness.adverse import bind, node
from harness.chart import SYSTEM, operator_kubeconfig
from harness.process import OperatorProcess
from harness.short_lease import LEASE_SECONDS, SHORT_LEASE, wait_renewal
from harness.space import Space, resource, running
from support.files import replace_text
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

HOUR = 3600
PLACE = ("--lease-namespace", SYSTEM)

Start = Callable[..., OperatorProcess]


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """The seconds by which the clock of an operator is ahead."""
    file = tmp_path / "ahead"
    file.write_text("0")
    return file


@pytest.fixture
def start(plane: ControlPlane, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Start operators with leader election in the test's namespace, each with a clock of its own."""
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    credentials = operator_kubeconfig(plane)

    def start(ahead: Path | None = None, *election: str) -> OperatorProcess:
        log = tmp_path / f"operator{len(operators)}.log"
        place = ("--namespace", space.name)
        operator = OperatorProcess(credentials, log, place, election=(*PLACE, *election), ahead=ahead)
        operators.append(operator)
        operator.start()
        return operator

    return start


@pytest.fixture
def home(plane: ControlPlane, space: Space) -> Iterator[str]:
    """A node without a kubelet."""
    name = f"home-{space.name[-20:]}"
    with node(plane, name):
        yield name


def start_pod(space: Space, home: str) -> None:
    """Let a kubelet start the engine of the only pod now. It loads for long."""
    (pod,) = space.wait_pods(1)
    bind(space, pod, home)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = running(ready=False, container={"state": {"running": {"startedAt": now}}, "started": False})
    status["conditions"] = [{**each, "lastTransitionTime": now} for each in status["conditions"]]
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")
    eventually(lambda: loads(space), within=20, what="a pod that starts")


def loads(space: Space) -> bool:
    """Return whether the status shows one pod, whose engine has started and is not overdue."""
    supply = space.get("fgd", "chat").get("status", {}).get("supply", {})
    return [(pod["state"], pod["message"]) for pod in supply["pods"]] == [("Starting", "its engine is not ready")]


def is_now(time: str) -> bool:
    return abs(datetime.now(UTC) - datetime.fromisoformat(time)) < timedelta(minutes=2)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_wrong_clock_makes_no_start_overdue_and_no_time_wrong(
    ahead: int, space: Space, start: Start, clock: Path, home: str
) -> None:
    replace_text(clock, str(ahead))
    operator = start(clock)
    space.apply(resource(startupDeadlineSeconds=600))
    start_pod(space, home)
    operator.let_resyncs_pass(2)
    assert loads(space)
    conditions = space.get("fgd", "chat")["status"]["conditions"]
    assert [each for each in conditions if not is_now(each["lastTransitionTime"])] == []
    events = space.items("events", fields="involvedObject.kind=FastGenDeployment")
    assert events
    assert [each for each in events if not is_now(each["lastTimestamp"])] == []


@pytest.mark.parametrize("jumps", [(HOUR, 0), (-HOUR, 0), (HOUR, -HOUR)], ids=["ahead", "behind", "to and fro"])
def test_a_clock_that_jumps_changes_nothing(
    jumps: tuple[int, int], space: Space, start: Start, clock: Path, home: str
) -> None:
    operator = start(clock)
    space.apply(resource(startupDeadlineSeconds=600))
    start_pod(space, home)
    space.kubectl("delete", "service", "chat", "--wait=false")
    eventually(lambda: space.get("service", "chat"), within=20, what="the restored Service")
    settled = space.settled()
    for jump in jumps:
        replace_text(clock, str(jump))
        operator.let_resyncs_pass(4)
        assert space.settled() == settled
        assert loads(space)
    assert operator.leads()
    assert space.server.request("GET", LEASE.path(SYSTEM, "fastgen-operator"))["spec"]["leaseTransitions"] == 0
    assert operator.is_healthy()
    # Retries and the queue run on another clock.
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.wait_pods(2)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_the_clock_of_the_holder_does_not_decide_when_its_lease_expires(
    ahead: int, space: Space, start: Start, clock: Path
) -> None:
    """Beside an operator whose clock is right, and takes over when the Lease has not changed for its duration."""
    replace_text(clock, str(ahead))
    first = start(clock, *SHORT_LEASE)
    eventually(first.leads, within=10, what="leadership", every=0.05)
    second = start(None, *SHORT_LEASE)
    space.apply(resource())
    space.wait_pods(1)
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 1.2 * LEASE_SECONDS, within=60, what="the duration of the Lease")
    assert (first.leads(), second.leads()) == (True, False)
    replace_text(clock, str(-ahead))
    renewed = wait_renewal(space.server)
    first.kill()
    eventually(second.leads, within=60, what="a take-over", every=0.05)
    assert time.monotonic() - renewed >= LEASE_SECONDS
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.wait_pods(2)
