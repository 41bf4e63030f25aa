"""Which pods are supply, what is learned about starts, and what the autoscaler does about pods that do not serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.rules.needs import missing_replicas
from fastgen_operator.autoscale.sample import Fleet
from fastgen_operator.autoscale.supply import StartTime, StartTimes, supply_of
from fastgen_operator.kinds import Object
from fastgen_operator.objects.container import Container
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.pod_failures import Failure, summary_of
from harness.fluid import FluidFleet, policy
from harness.objects import container, leaving, pod, pod_with

DEADLINE = 1800.0
# Usually 5 s until the container runs, and 60 s until it is ready.
USUAL = StartTimes().learn(
    [pod_with("first", revision="new", scheduled_at=0.0, started_at=5.0, ready_since=65.0)], DEADLINE
)


def state(pod: Pod, time: float, starts: StartTimes = USUAL, failures: dict[str, Failure] | None = None) -> str:
    return supply_of(pod, summary_of(pod, failures), starts, DEADLINE, time).state


def at(second: int) -> str:
    return f"2026-01-01T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"


EPOCH = 1767225600.0


def seen(*, ready: bool = False, since: int = 0, **status: Any) -> Object:
    """Return a pod that got its node at second 0, and whose readiness changed last at second `since`."""
    found = pod("new", ready=ready, **status)
    for condition in found["status"]["conditions"]:
        condition["lastTransitionTime"] = at(since if condition["type"] == "Ready" else 0)
    return found


def running(second: int, **more: Any) -> Object:
    return container(state={"running": {"startedAt": at(second)}}, **more)


def test_each_state_is_read_from_the_pod() -> None:
    starting = Pod(seen(**running(5)))
    crashed = container(restarts=3, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {}})
    silent = seen(**running(5, ready=True))
    silent["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    gated = pod("new", scheduled="")
    gated["status"]["conditions"].append({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"})
    mounting = seen()
    views = {
        "Ready": Pod(seen(ready=True, since=60, **running(5, ready=True))),
        "Starting": starting,
        "Unschedulable": Pod(pod("new", scheduled="0/3 nodes are available")),
        "Failing": Pod(seen(**crashed)),
        "Lost": Pod(silent),
        "Draining": Pod(leaving(seen(ready=True), until=at(90))),
    }
    assert {name: state(one, EPOCH + 20) for name, one in views.items()} == {name: name for name in views}
    assert state(Pod(gated), EPOCH) == "Unschedulable"
    assert state(Pod(mounting), EPOCH) == "Starting"
    failures = {"chat-new-x": Failure("FailedMount", "no such Secret")}
    assert state(Pod(mounting), EPOCH, failures=failures) == "Failing"
    assert state(views["Draining"], EPOCH + 90 + 61) == "Lost"


def test_a_pod_that_waits_for_its_readiness_gates_is_not_lost() -> None:
    found = seen(**running(5, ready=True))
    found["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    found["status"]["conditions"][0]["reason"] = "ReadinessGatesNotReady"
    assert state(Pod(found), EPOCH + 20) == "Starting"


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        pytest.param({"started_at": 5.0}, 5 + 120, id="running: twice the usual time"),
        pytest.param({"started_at": 300.0}, 300 + 120, id="restarted in place: from the new start"),
        pytest.param({"started_at": 5.0, "unready_since": 500.0}, 500 + 120, id="was ready: from then"),
        pytest.param({}, 300, id="no container yet: an image is pulled"),
        pytest.param({"ended_at": 9000.0}, 9000 + 300, id="its container just ended, and is restarted"),
        pytest.param({"started_at": 5.0, "revision": "newer"}, 5 + DEADLINE, id="unknown revision: the deadline"),
    ],
)
def test_a_start_that_takes_much_longer_than_usual_fails(fields: dict[str, Any], seconds: float) -> None:
    found = pod_with("chat-x", **{"revision": "new", "scheduled_at": 0.0, **fields})
    assert state(found, seconds) == "Starting"
    assert state(found, seconds + 1) == "Failing"


def test_an_engine_that_just_ended_is_not_failing_yet() -> None:
    ended = {"exitCode": 1, "finishedAt": at(9000), "startedAt": at(5)}
    for status in (
        container(state={"terminated": ended}),
        container(restarts=1, state={"waiting": {}}, lastState={"terminated": ended}),
    ):
        assert state(Pod(seen(**status)), EPOCH + 9010) == "Starting"


def test_a_quick_start_may_take_a_minute() -> None:
    quick = pod_with("quick", revision="new", scheduled_at=0.0, started_at=0.0, ready_since=4.0)
    starts = StartTimes().learn([quick], DEADLINE)
    other = pod_with("other", revision="new", scheduled_at=0.0, started_at=0.0)
    assert state(other, 59.0, starts) == "Starting"
    assert state(other, 61.0, starts) == "Failing"


def test_a_node_whose_clock_is_behind_does_not_make_its_pods_fail() -> None:
    """The container seems to have run for ten minutes when it starts."""
    behind = pod_with("x", revision="new", scheduled_at=1000.0, started_at=400.0)
    starts = StartTimes().learn([pod_with("y", revision="new", scheduled_at=0, started_at=0, ready_since=60)], 9e9)
    assert state(behind, 1010.0, starts) == "Starting"
    assert state(behind, 1130.0, starts) == "Failing", "later than twice the usual minute"


# --- start times


def ready(name: str, scheduled: float, started: float, since: float, **fields: Any) -> Pod:
    times = {"scheduled_at": scheduled, "started_at": started, "ready_since": since}
    return pod_with(name, **{"revision": "new", **times, **fields})


def test_a_start_is_learned_from_the_containers_start() -> None:
    """Not from the pod's creation: it may have waited for a node for hours."""
    found = Pod(seen(ready=True, since=65, **running(5, ready=True)))
    assert StartTimes().learn([found], DEADLINE).expected("new") == StartTime(5.0, 60.0)


def test_a_restart_in_place_does_not_look_like_a_start_of_hours() -> None:
    restarted = ready("chat-x", 0.0, 10_800.0, 10_860.0, engine=Container(restarts=1))
    assert StartTimes().learn([restarted], DEADLINE).expected("new") == StartTime(0.0, 60.0)
    before = StartTimes().learn([ready("chat-x", 0.0, 10.0, 70.0)], DEADLINE)
    assert before.learn([restarted], DEADLINE).expected("new") == StartTime(10.0, 60.0)


def test_a_pod_that_becomes_ready_again_does_not_change_its_start() -> None:
    starts = StartTimes().learn([ready("chat-x", 0.0, 5.0, 65.0)], DEADLINE)
    again = ready("chat-x", 0.0, 5.0, 1000.0)
    assert starts.learn([again], DEADLINE) is starts
    # A restarted operator sees only this: later than the kubelet would have waited, so it was ready before.
    assert StartTimes().learn([ready("chat-x", 0.0, 5.0, 5.0 + DEADLINE + 1)], DEADLINE).starts == ()


def test_each_revision_has_its_own_start_time_and_a_new_one_takes_the_latest() -> None:
    starts = StartTimes().learn(
        [ready("a", 0.0, 5.0, 65.0), ready("b", 500.0, 500.0, 900.0, revision="large")], DEADLINE
    )
    assert starts.expected("new") == StartTime(5.0, 60.0)
    assert starts.expected("large") == StartTime(0.0, 400.0)
    assert starts.expected("unknown") is None
    assert starts.expected_of_next("unknown") == StartTime(0.0, 400.0)


def test_many_starts_are_not_kept_for_ever() -> None:
    starts = StartTimes()
    for number in range(200):
        starts = starts.learn([ready(f"p{number}", number, number, number + 60.0, revision=f"r{number // 50}")], 1e4)
    assert len(starts.starts) <= 4 * 32
    assert starts.learn([ready("old", 0.0, 0.0, 60.0, revision="r0")], 1e4).expected("r3") == StartTime(0.0, 60.0)


# --- what the autoscaler does about it


def test_a_pod_that_never_becomes_ready_is_replaced_and_then_removed() -> None:
    stuck = FluidFleet.of(3, policy(max_replicas=16), lambda time: 2.4 if time < 600 else 3.1, stuck={"pod-4"})
    stuck.run(2400)
    assert "pod-4" not in stuck.replicas
    assert len(stuck.observed().ready) == 4, "as many as the load needs"
    changes = [(change.reason, size) for size, change in stuck.changes if size > 3]
    assert changes == [("DemandGrew", 4), ("ReplicasMissing", 5), ("ReplicasReplaced", 4)]
    replaced = next(change for size, change in stuck.changes if change.reason == "ReplicasReplaced")
    assert replaced.message == "4 replicas ready and sufficient; 1 replica failing or lost removed"


def test_a_failing_pod_that_still_has_a_replica_is_replaced_once() -> None:
    """Of five pods for four replicas, the ReplicaSet controller deletes the failing one: it needs no replacement."""
    fleet = Fleet(replicas=4, ready=frozenset("abcd"), failing=1)
    assert missing_replicas(fleet, ReplicaSpeeds(), 5) == 1
    assert missing_replicas(fleet, ReplicaSpeeds(), 4) == 0
    starting = replace(fleet, starting=(0.0,))
    assert missing_replicas(starting, ReplicaSpeeds(), 6) == 1, "a pod that is ordered already does not change that"


def test_the_growth_for_failing_pods_is_bounded() -> None:
    fleet = FluidFleet.of(4, policy(max_replicas=50), lambda time: 3.0 if time < 600 else 5.0, never_start=True)
    fleet.run(6000)
    # Twelve at most by load and backlog, and a quarter of the ready ones more.
    assert max(fleet.sizes) <= 12 + 1
