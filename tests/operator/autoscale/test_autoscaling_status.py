"""Input of the autoscaler from a reconcile, and its decisions in the status. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fastgen_operator.autoscale.decision import Change, Decision, Hold, Limit, Sizing
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity, ReplicaSpeeds, Straggler
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.supply import PodSupply
from fastgen_operator.autoscale.watchlist import Subject, Watchlist
from fastgen_operator.kinds import DEPLOYMENT, Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation
from fastgen_operator.plan.subject import subject_of
from fastgen_operator.status.autoscaling import (
    autoscaling_status,
    capacity_status,
    stragglers_status,
    supply_status,
)
from fastgen_operator.status.conditions.table import all_conditions
from fastgen_operator.status.status import scaling_notice, schedule_notice
from harness.objects import deployment, pod, pod_template, pod_with, situation, spec_of, stored

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"
GREW = Change("DemandGrew", "the demand uses 90 % of 2 replicas; target 85 %")


def autoscaled(live: int | None = 2, status: dict[str, Any] | None = None, **autoscaling: Any) -> Situation:
    """Return a resource whose Deployment has `live` replicas."""
    owner = stored(autoscaling={"maxReplicas": 5, **autoscaling})
    owner = owner if status is None else {**owner, "status": status}
    child = deployment(owner)
    made = {} if live is None else {(DEPLOYMENT, "chat"): {**child, "spec": {**child["spec"], "replicas": live}}}
    return situation(Observed(owner, made))


def decided(seen: Situation, replicas: int, change: Change | None = GREW, **fields: Any) -> Situation:
    return replace(seen, decision=Decision(replicas, change, **fields))


def scaling_status(seen: Situation, now: str = NOW) -> dict[str, Any]:
    found = autoscaling_status(seen, now)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("seen", "replicas"),
    [
        (autoscaled(None, minReplicas=2), 2),
        (autoscaled(4), 4),
        (autoscaled(9), 5),
        (autoscaled(1, minReplicas=3), 3),
        (decided(autoscaled(4), 3), 3),
        (decided(autoscaled(4), 50), 5),
    ],
)
def test_desired_replicas_are_the_decision_or_the_current_ones_within_the_bounds(
    seen: Situation, replicas: int
) -> None:
    assert seen.desired_replicas == replicas


def test_a_change_is_recorded_once_with_its_reason() -> None:
    first = scaling_status(autoscaled(2))
    assert first == {"desiredReplicas": 2}
    second = scaling_status(decided(autoscaled(2, {"autoscaling": first}), 3))
    assert second["history"] == [
        {"time": NOW, "fromReplicas": 2, "toReplicas": 3, "reason": GREW.reason, "message": GREW.message}
    ]
    again = scaling_status(
        decided(autoscaled(3, {"autoscaling": second}), 3, Change("DemandJumped", "other words")), LATER
    )
    assert again == second, "an unchanged decision must not change the status"


def sized(demand: float, replicas: int, before: dict[str, Any], is_warm: bool = True, **fields: Any) -> dict[str, Any]:
    sizing = Sizing(demand, 8000.0, 0.85, missing=0.0, is_warm=is_warm)
    return scaling_status(decided(autoscaled(2, {"autoscaling": before}), replicas, sizing=sizing, **fields), LATER)


ARITHMETIC = (
    "17,000 tokens/s arrive, and a replica computes 8,000 within its latency targets, of which 85 % are to be used: "
    "2.5 replicas; rounded up"
)


def test_the_message_has_inputs_target_and_arithmetic_and_the_event_the_same_words() -> None:
    before = {"desiredReplicas": 2}
    after = sized(17_120.0, 3, before)
    assert after["message"] == f"3 replicas: {ARITHMETIC}"
    notice = scaling_notice({"status": {"autoscaling": before}}, {"autoscaling": after})
    assert notice is not None
    assert notice.message == f"from 2 to 3 replicas: {GREW.message}; {ARITHMETIC}"
    assert after["history"][0]["message"] == f"{GREW.message}; {ARITHMETIC}"


def test_the_message_is_about_now_and_stays_while_the_demand_is_about_the_same() -> None:
    first = sized(17_120.0, 3, {"desiredReplicas": 2})
    for demand in (15_000.0, 21_000.0):
        assert sized(demand, 3, first) == first
    later = sized(8000.0, 3, first)
    assert later["message"].startswith("3 replicas: 8,000 tokens/s arrive, ")
    kept = "more are kept for the backlog, the KV cache or the limits of scaling down"
    assert later["message"].endswith(f"1.2 replicas; {kept}")
    assert (later["history"], later["lastScaleTime"]) == (first["history"], LATER), "it is no change"
    idle = sized(0.0, 1, {"desiredReplicas": 1, "demandTokensPerSecond": 0, "message": f"1 replica: {ARITHMETIC}"})
    assert sized(1500.0, 1, idle) == idle, "noise of an idle fleet"


def test_the_first_intervals_after_a_restart_of_the_operator_correct_no_message() -> None:
    first = sized(17_120.0, 3, {"desiredReplicas": 2})
    assert sized(8000.0, 3, first, is_warm=False) == first
    assert sized(8000.0, 3, first, is_warm=True) != first
    assert sized(8000.0, 3, {"desiredReplicas": 3}, is_warm=False)["demandTokensPerSecond"] == 8000


def test_the_message_does_not_repeat_the_reason_of_the_last_change() -> None:
    """What was true when replicas were added need not be true any more."""
    backlog = Change("BacklogTooLong", "the backlog of 60,000 tokens takes 8 s on 2 replicas; target 2 s")
    after = sized(17_120.0, 3, {"desiredReplicas": 2}, change=backlog)
    assert backlog.message in after["history"][0]["message"]
    assert "backlog of 60,000" not in after["message"]


def test_the_message_names_the_bound_that_applies_now_and_follows_it() -> None:
    first = sized(17_120.0, 3, {"desiredReplicas": 2})
    limit = Limit("TooManyReplicas", "the load requires more than spec.autoscaling.maxReplicas, 3")
    limited = sized(17_120.0, 3, first, limit=limit)
    assert limited["message"].endswith(f"2.5 replicas; {limit.message}")
    assert sized(17_120.0, 3, limited, limit=limit) == limited
    held = sized(17_120.0, 3, limited, hold=Hold("MetricsStale", "no usable metrics for 15 s"))
    assert held["message"].endswith("; held: no usable metrics for 15 s")
    assert sized(17_120.0, 3, held) == first, "the bound is gone"
    blind = scaling_status(decided(autoscaled(2, {"autoscaling": first}), 3, hold=Hold("NoMetrics", "no metrics")))
    assert blind["message"] == "3 replicas: held: no metrics"


OFFICE: Object = {"name": "office", "start": "0 9 * * *", "end": "0 18 * * *", "timeZone": "UTC"}


def floored(live: int, replicas: int = 4, **known: Any) -> Situation:
    """Return a resource with a schedule that is active."""
    seen = autoscaled(live, known.pop("status", None), schedules=[{**OFFICE, "minReplicas": replicas}])
    return replace(seen, now=datetime(2026, 11, 23, 12, tzinfo=UTC), **known)


FLOOR_WORDS = "schedule office requires at least 4 replicas until 2026-11-23T18:00:00+00:00"


def test_a_schedule_raises_the_replicas_at_once_and_status_and_events_say_which_and_until_when() -> None:
    before = {"desiredReplicas": 2}
    seen = floored(2, status={"autoscaling": before}, decision=Decision(2, GREW))
    assert seen.desired_replicas == 4
    after = scaling_status(seen)
    assert after["activeSchedule"] == {"name": "office", "minReplicas": 4, "until": "2026-11-23T18:00:00+00:00"}
    assert (after["reason"], after["message"]) == ("ScheduleStarted", f"4 replicas: {FLOOR_WORDS}")
    owner: Object = {**seen.observed.resource, "status": {"autoscaling": before}}
    notices = [make(owner, {"autoscaling": after}) for make in (schedule_notice, scaling_notice)]
    assert [(notice.reason, notice.message) for notice in notices if notice] == [
        ("ScheduleStarted", FLOOR_WORDS),
        ("ScaledUp", f"from 2 to 4 replicas: {FLOOR_WORDS}"),
    ]
    sized_too = scaling_status(replace(seen, decision=Decision(4, sizing=Sizing(8000.0, 8000.0, 0.85, 0.0))))
    assert sized_too["message"].endswith(f"1.2 replicas; {FLOOR_WORDS}")
    # It ends: the replicas leave by the policy, and the bound leaves the status.
    over = scaling_status(decided(autoscaled(4, {"autoscaling": after}), 4))
    assert "activeSchedule" not in over
    ended = schedule_notice({**owner, "status": {"autoscaling": after}}, {"autoscaling": over})
    assert ended is not None
    assert ended.reason == "ScheduleEnded"
    assert ended.message == "schedule office no longer applies; spec.autoscaling.minReplicas is 1"
    assert schedule_notice({**owner, "status": {"autoscaling": after}}, {"autoscaling": after}) is None
    assert schedule_notice({**owner, "status": {"autoscaling": after}}, {}) is None, "autoscaling was removed"


def test_a_schedule_applies_before_the_first_decision_and_within_max_replicas() -> None:
    assert floored(2).desired_replicas == 4
    assert floored(2, replicas=9).desired_replicas == 5
    assert floored(5).desired_replicas == 5


def dry(recommended: int | None, status: dict[str, Any] | None = None, **fields: Any) -> Situation:
    """Return a resource in a dry run with two replicas."""
    owner = stored(replicas=2, autoscaling={"maxReplicas": 5, "mode": "DryRun"})
    owner = owner if status is None else {**owner, "status": {"autoscaling": status}}
    decision = None if recommended is None else Decision(recommended, GREW, **fields)
    return situation(Observed(owner), decision=decision)


def test_a_dry_run_shows_what_would_be_done_and_does_nothing() -> None:
    assert dry(5).desired_replicas == 2
    sizing = Sizing(17_120.0, 8000.0, 0.85, 0.0)
    first = scaling_status(dry(3, sizing=sizing))
    assert (first["recommendedReplicas"], first["message"]) == (3, f"3 replicas: {ARITHMETIC}")
    assert "desiredReplicas" not in first
    assert scaling_status(dry(3, first, sizing=sizing)) == first
    assert scaling_status(dry(None, first)) == first, "a restart of the operator"
    second = scaling_status(dry(4, first, sizing=sizing, limit=Limit("RateLimited", "limited")))
    owner = dry(4, first).observed.resource
    notice = scaling_notice(owner, {"autoscaling": second})
    assert notice is not None
    assert notice.reason == "ScalingRecommended"
    assert notice.message == f"in a dry run, while spec.replicas is 2: {second['message']}"
    assert scaling_notice(owner, {"autoscaling": first}) is None
    assert "history" not in second, "nothing was changed"
    assert conditions_of(dry(4))["ScalingActive"] == ("False", "DryRun")
    assert conditions_of(dry(4, hold=Hold("NoMetrics", "no metrics")))["ScalingActive"] == ("False", "NoMetrics")
    assert subject(dry(4)).is_dry_run


def test_a_dry_run_keeps_the_history_and_ends_without_a_change() -> None:
    auto = sized(17_120.0, 3, {"desiredReplicas": 2})
    shown = scaling_status(dry(4, auto))
    assert shown["history"] == auto["history"]
    again = scaling_status(autoscaled(2, {"autoscaling": shown}))
    assert again["desiredReplicas"] == 2
    assert "recommendedReplicas" not in again
    assert again["history"] == auto["history"]


def test_the_history_keeps_five_changes_newest_first() -> None:
    status = scaling_status(autoscaled(1))
    for replicas in (2, 3, 2, 4, 1, 5, 2):
        status = scaling_status(decided(autoscaled(1, {"autoscaling": status}), replicas))
    assert [step["toReplicas"] for step in status["history"]] == [2, 5, 1, 4, 2]


def test_a_restarted_operator_keeps_the_status() -> None:
    limited = {
        "type": "ScalingLimited",
        "status": "True",
        "reason": "TooManyReplicas",
        "message": "as recorded",
        "lastTransitionTime": NOW,
    }
    before = {
        "autoscaling": scaling_status(decided(autoscaled(2), 3)),
        "capacity": {"tokensPerSecond": 7},
        "conditions": [limited],
    }
    seen = autoscaled(3, before)
    assert scaling_status(seen, LATER) == before["autoscaling"]
    assert capacity_status(seen) == before["capacity"]
    conditions = all_conditions(seen, None)
    assert conditions["ScalingLimited"].reason == "TooManyReplicas"
    assert conditions["ScalingActive"].status == "Unknown"


def test_without_a_decision_new_bounds_are_the_reason() -> None:
    before = {"autoscaling": {"desiredReplicas": 2}}
    assert scaling_status(autoscaled(2, before, minReplicas=3))["reason"] == "BoundsChanged"


def test_only_a_change_records_an_event() -> None:
    owner: Object = {"status": {"autoscaling": {"desiredReplicas": 2}}}
    after = {"autoscaling": scaling_status(decided(autoscaled(2, {"autoscaling": {"desiredReplicas": 2}}), 3))}
    notice = scaling_notice(owner, after)
    assert notice is not None
    assert (notice.reason, notice.message) == ("ScaledUp", f"from 2 to 3 replicas: {GREW.message}")
    fewer = scaling_notice({"status": after}, {"autoscaling": scaling_status(decided(autoscaled(3, after), 1))})
    assert fewer is not None
    assert (fewer.reason, fewer.message) == ("ScaledDown", f"from 3 to 1 replica: {GREW.message}")
    assert scaling_notice({"status": after}, after) is None
    assert scaling_notice(owner, {"autoscaling": {"desiredReplicas": 2}}) is None


def test_capacity_is_rounded_and_updated_only_if_it_changed_notably() -> None:
    def shown(rate: float, old: dict[str, Any] | None) -> Any:
        measured = ReplicaSpeeds(capacity=MeasuredCapacity(rate, 256, "StepModel"))
        return capacity_status(replace(autoscaled(2, {"capacity": old} if old else {}), speeds=measured))

    first = shown(7192.3, None)
    assert first == {"tokensPerSecond": 7200, "tokenBudget": 256, "source": "StepModel"}
    assert shown(6100.0, first) is first
    assert shown(5600.0, first)["tokensPerSecond"] == 5600
    assert shown(0.4, None)["tokensPerSecond"] == 0


def fixed(replicas: int, **known: Any) -> Situation:
    """Return a resource without autoscaling."""
    return situation(Observed(stored(replicas=replicas)), **known)


def subject(seen: Situation) -> Subject:
    return subject_of(seen, 5.0)


@pytest.mark.parametrize("replicas", [0, 2])
def test_a_fixed_number_of_replicas_is_measured_and_not_sized(replicas: int) -> None:
    capacity = MeasuredCapacity(7200.0, 256, "StepModel")
    seen = fixed(replicas, speeds=ReplicaSpeeds(capacity=capacity))
    assert not subject(seen).is_autoscaled
    assert autoscaling_status(seen, NOW) is None
    assert capacity_status(seen) == {"tokensPerSecond": 7200, "tokenBudget": 256, "source": "StepModel"}


def conditions_of(seen: Situation) -> dict[str, tuple[str, str]]:
    found = all_conditions(seen, None)
    return {kind: (condition.status, condition.reason) for kind, condition in found.items()}


def test_the_scaling_conditions_exist_without_autoscaling() -> None:
    found = conditions_of(fixed(2))
    assert found["ScalingActive"] == found["ScalingLimited"] == ("False", "ScalingDisabled")


def test_a_straggler_is_named_in_a_condition() -> None:
    capacity = MeasuredCapacity(7200.0, 256, "StepModel")
    assert conditions_of(fixed(3))["ReplicasUniform"] == ("Unknown", "NotObserved")
    even = fixed(3, speeds=ReplicaSpeeds(capacity=capacity))
    assert conditions_of(even)["ReplicasUniform"] == ("True", "NoStragglers")
    found = []
    # The order by speed fluctuates; the message must not.
    for shares in ((0.3, 0.4), (0.4, 0.3)):
        slow = tuple(sorted(map(Straggler, ("chat-b", "chat-a"), shares), key=lambda straggler: straggler.share))
        odd = fixed(3, speeds=ReplicaSpeeds(capacity=capacity, stragglers=slow))
        assert conditions_of(odd)["ReplicasUniform"] == ("False", "Stragglers")
        found.append(all_conditions(odd, None)["ReplicasUniform"].message)
    assert found[0] == found[1]
    assert "chat-a, chat-b" in found[0]


def test_the_status_names_all_stragglers_and_keeps_them_while_no_speed_is_known() -> None:
    capacity = MeasuredCapacity(7200.0, 256, "StepModel")
    names = [f"chat-{n}" for n in range(8)]
    slow = tuple(Straggler(name, 0.3 + 0.01 * n) for n, name in enumerate(reversed(names)))
    assert stragglers_status(fixed(20, speeds=ReplicaSpeeds(capacity=capacity, stragglers=slow))) == names
    assert stragglers_status(fixed(20, speeds=ReplicaSpeeds(capacity=capacity))) is None
    assert stragglers_status(fixed(20)) is None
    before = {"stragglers": names}
    assert stragglers_status(autoscaled(20, before)) == names
    assert stragglers_status(replace(autoscaled(20, before), speeds=ReplicaSpeeds(capacity=capacity))) is None


def test_the_status_says_which_pods_do_not_serve() -> None:
    supply = (
        PodSupply(pod_with("chat-1"), "Ready"),
        PodSupply(pod_with("chat-2"), "Starting", "its engine is not ready"),
        PodSupply(pod_with("chat-3"), "Unschedulable", "0/3 nodes are available"),
        PodSupply(pod_with("chat-4"), "Failing", "CrashLoopBackOff: pod chat-4"),
        PodSupply(pod_with("chat-5"), "Lost", "its node does not respond"),
        PodSupply(pod_with("chat-6"), "Draining", "is being deleted"),
    )
    found = supply_status(supply)
    states = ("ready", "starting", "unschedulable", "failing", "lost", "draining")
    assert {state: found[state] for state in states} == dict.fromkeys(states, 1)
    assert [pod["name"] for pod in found["pods"]] == ["chat-4", "chat-5", "chat-3", "chat-2", "chat-6"]
    assert found["pods"][0] == {"name": "chat-4", "state": "Failing", "message": "CrashLoopBackOff: pod chat-4"}
    many = supply_status([PodSupply(pod_with(f"chat-{n:02}"), "Starting", "waits") for n in range(50)])
    assert (many["starting"], len(many["pods"])) == (50, 10)


def arguments_of(owner: Object) -> list[str]:
    found: list[str] = pod_template(owner)["spec"]["containers"][0]["args"]
    return found


@pytest.mark.parametrize(("target", "seconds"), [(20, 0.02), ("auto", 0.05), ("off", 0.05)])
def test_the_replicas_are_sized_for_the_inter_token_target_of_the_engines(target: int | str, seconds: float) -> None:
    engine = {"device": "cpu", "interTokenTarget": target}
    autoscaled, fixed = stored(engine=engine, autoscaling={"maxReplicas": 2}), stored(engine=engine)
    policy = policy_of(spec_of(autoscaled), 1, 5.0)
    assert policy.inter_token_seconds == seconds
    arguments = arguments_of(autoscaled)
    assert arguments == arguments_of(fixed), "the pods do not depend on autoscaling"
    found = arguments[arguments.index("--inter-token-target") + 1] if target != "auto" else "auto"
    assert found == str(target)


@pytest.mark.parametrize("target", [20, "auto"])
def test_a_target_of_the_autoscaler_sizes_the_replicas_and_changes_no_pod(target: int | str) -> None:
    engine = {"device": "cpu", "interTokenTarget": target}
    targets = {"targets": {"interTokenLatencyMilliseconds": 80}}
    sized, plain = (stored(engine=engine, autoscaling={"maxReplicas": 2, **more}) for more in (targets, {}))
    fixed = stored(engine=engine, replicas=2)
    policy = policy_of(spec_of(sized), 1, 5.0)
    assert policy.inter_token_seconds == 0.08
    assert arguments_of(sized) == arguments_of(plain) == arguments_of(fixed)


@pytest.mark.parametrize(("access_mode", "without_room"), [("ReadWriteOnce", 1), ("ReadWriteMany", 0)])
def test_a_pod_that_does_not_fit_on_the_node_of_the_volume_is_no_supply(access_mode: str, without_room: int) -> None:
    waits, serves = pod("new", name="w", scheduled="no GPU"), pod("new", name="s", ready=True)
    for found in (waits, serves):
        for condition in found["status"]["conditions"]:
            condition["lastTransitionTime"] = NOW
    owner = autoscaled(2).observed.resource
    cache = {"size": "1Gi", "accessMode": access_mode}
    owner = {**owner, "spec": {**owner["spec"], "model": {"source": "hf://a/b"}, "cache": cache}}
    observed_fleet = subject(situation(Observed(owner, pods=(Pod(serves), Pod(waits)))))
    fleet = observed_fleet.fleet({}, observed_fleet.supply(0.0))
    assert (fleet.without_room, len(fleet.ready), fleet.starting) == (without_room, 1, ())


def test_a_recreated_resource_starts_without_a_decision() -> None:
    watchlist = Watchlist(5.0)
    seen = autoscaled(2)
    key = seen.observed.key
    assert watchlist.lookup(key, "uid-of-chat") is None
    watchlist.register(key, subject(seen))
    record = watchlist.open_record(key, subject(seen))
    assert record is not None
    assert watchlist.open_record(key, replace(subject(seen), uid="another")) is None
    assert watchlist.lookup(key, "uid-of-chat") is record
    assert watchlist.lookup(key, "another") is None
    watchlist.forget(key)
    assert watchlist.subjects() == []
    assert watchlist.open_record(key, subject(seen)) is None


def test_switching_autoscaling_off_and_on_forgets_the_decision_and_not_the_speeds() -> None:
    watchlist = Watchlist(5.0)
    seen = autoscaled(2)
    key = seen.observed.key
    watchlist.register(key, subject(seen))
    record = watchlist.open_record(key, subject(seen))
    assert record is not None
    capacity = MeasuredCapacity(7200.0, 256, "StepModel")
    record.decision = Decision(5)
    record.state = replace(record.state, replicas=5, speeds=ReplicaSpeeds(capacity=capacity))
    watchlist.register(key, subject(seen))
    assert watchlist.lookup(key, "uid-of-chat") is record
    watchlist.register(key, subject(fixed(2)))
    watchlist.register(key, subject(seen))
    now = watchlist.lookup(key, "uid-of-chat")
    assert now is not None
    assert (now.decision, now.state.replicas, now.speeds.capacity) == (None, 0, capacity)


def test_what_was_scraped_before_autoscaling_was_switched_off_decides_nothing() -> None:
    watchlist = Watchlist(5.0)
    seen = autoscaled(2)
    key = seen.observed.key
    in_flight = subject(seen)
    watchlist.register(key, in_flight)
    watchlist.register(key, subject(fixed(2)))
    assert watchlist.open_record(key, in_flight) is None
    watchlist.register(key, subject(seen))
    record = watchlist.open_record(key, in_flight)
    assert record is not None
    assert (record.mode, record.decision) == (in_flight.mode, None)
