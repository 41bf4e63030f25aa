"""Decisions of the autoscaler under load, noise, missing metrics and restarts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastgen_operator.autoscale.decision import Hold
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.sample import Fleet, Sample
from harness.fluid import BUDGET, PROMPT_RATE, RATE, STEP, FluidFleet, policy


def constant(load: float) -> Callable[[float], float]:
    return lambda _: load


def settled(load: float, replicas: int, **options: float) -> FluidFleet:
    """Return a fleet that has had the load for longer than any window."""
    return FluidFleet.of(replicas, policy(), constant(load), **options).run(1200)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    load=st.floats(0.0, 12.0),
    first=st.integers(1, 12),
    start=st.floats(5.0, 300.0),
    noise=st.floats(0.0, 0.1),
    seed=st.integers(0, 1000),
)
def test_a_constant_load_converges_to_a_fixed_size_under_noise(
    load: float, first: int, start: float, noise: float, seed: int
) -> None:
    # Long enough to remove 12 replicas step by step, after the windows.
    fleet = FluidFleet.of(first, policy(), constant(load), start=start, noise=noise, seed=seed).run(2700)
    last = fleet.sizes[-180:]
    # If the noise is at a threshold, the scale-down may come late; afterwards nothing is added again.
    assert last == sorted(last, reverse=True), fleet.sizes
    assert last[0] - last[-1] <= 1, fleet.sizes
    assert last[-1] >= load, "the fleet cannot take its load"
    most = math.ceil(load * (1 + 2 * noise) / fleet.policy.down_utilization) + 1
    assert last[-1] <= max(1, most), "more than the load needs"


@settings(max_examples=10, deadline=None)
@given(
    loads=st.lists(st.floats(0.0, 30.0), min_size=4, max_size=4),
    least=st.integers(1, 5),
    span=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_a_fleet_stays_within_its_bounds(loads: list[float], least: int, span: int, seed: int) -> None:
    bounds = policy(min_replicas=least, max_replicas=least + span)
    fleet = FluidFleet.of(least, bounds, lambda time: loads[int(time / 150) % 4], noise=0.1, seed=seed).run(900)
    assert least <= min(fleet.sizes)
    assert max(fleet.sizes) <= least + span


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(load=st.floats(0.1, 10.0), more=st.floats(0.0, 10.0))
def test_more_load_never_gives_fewer_replicas(load: float, more: float) -> None:
    assert settled(load + more, 3).sizes[-1] >= settled(load, 3).sizes[-1]


def test_a_demand_is_warm_after_the_time_constant_of_its_average() -> None:
    fleet = FluidFleet.of(3, policy(), constant(2.0)).run(60)
    # The first sample of a replica gives no rate.
    known = [decision.sizing.is_warm for decision in fleet.decisions if decision.sizing is not None]
    assert known == [False] * 5 + [True] * 6


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(load=st.floats(0.2, 6.0), seed=st.integers(0, 1000))
def test_a_restart_of_the_operator_changes_nothing(load: float, seed: int) -> None:
    # Excludes cases in which noise alone can cause a late scale-down: see above.
    share = policy().down_utilization
    assume(math.ceil(load * 1.1 / share) == math.ceil(load * 0.95 / share))
    fleet = FluidFleet.of(3, policy(), constant(load), noise=0.1, seed=seed).run(2400)
    before = fleet.sizes[-1]
    assert len(set(fleet.sizes[-60:])) == 1
    fleet.state = State()
    fleet.samples.clear()
    fleet.run(900)
    assert set(fleet.sizes[-180:]) == {before}


def test_after_a_restart_in_a_lull_nothing_is_removed_for_a_full_window() -> None:
    fleet = FluidFleet.of(10, policy(), lambda time: 8.0 if time < 1000 else 0.5).run(1010)
    before = fleet.sizes[-1]
    fleet.state = State()
    fleet.run(295)
    assert set(fleet.sizes[-59:]) == {before}
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == "HoldAfterRestart"
    fleet.run(200)
    assert fleet.sizes[-1] < before


@pytest.mark.parametrize("start", [10.0, 60.0, 600.0])
def test_pending_pods_are_supply_so_slow_starts_do_not_overshoot(start: float) -> None:
    fleet = FluidFleet.of(1, policy(), lambda time: 0.5 if time < 300 else 4.0, start=start).run(300 + 6 * start + 600)
    # The backlog of one start time is drained within another one: twice the load, not more.
    assert max(fleet.sizes) <= 2 * 4
    assert fleet.sizes[-1] >= 4


@pytest.mark.parametrize(("load", "most"), [(1.5, 5), (2.0, 6), (3.0, 8)])
def test_pods_that_never_start_do_not_cause_unbounded_growth(load: float, most: int) -> None:
    """The backlog grows until the queue is full. One of the failing pods is replaced, and no more."""
    fleet = FluidFleet.of(1, policy(), lambda time: 0.5 if time < 300 else load, never_start=True).run(2100)
    assert len(fleet.observed().ready) == 1
    assert fleet.sizes[-1] >= load
    assert max(fleet.sizes) <= most


def test_a_burst_shorter_than_a_pod_start_adds_no_pods() -> None:
    def burst(time: float) -> float:
        return 1.5 if 600 <= time < 605 else 0.4

    fleet = FluidFleet.of(1, policy(), burst, start=120.0).run(1200)
    assert set(fleet.sizes) == {1}


def test_a_jump_scales_up_within_two_scrapes() -> None:
    fleet = FluidFleet.of(1, policy(), lambda time: 0.3 if time <= 600 else 5.0).run(600)
    fleet.run(2 * fleet.policy.scrape_seconds)
    assert fleet.sizes[-1] > 1
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason in ("DemandJumped", "BacklogTooLong")


def test_a_scale_down_removes_at_most_a_quarter_in_half_a_minute() -> None:
    fleet = FluidFleet.of(20, policy(), lambda time: 14.0 if time < 600 else 1.0).run(3000)
    steps = [(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(fleet.sizes)) if b < a]
    assert steps
    assert all(before - after <= max(1, before // 4) for _, before, after in steps)
    assert all(5 * (later[0] - earlier[0]) >= 30 for earlier, later in itertools.pairwise(steps))


def test_a_replica_is_removed_only_if_the_others_would_not_be_at_their_target() -> None:
    # 85 % of three replicas are 2.55; 93 % of that are 2.37.
    assert settled(2.3, 4).sizes[-1] == 3
    assert settled(2.45, 4).sizes[-1] == 4


def recurring(time: float) -> float:
    """Return the load of one-minute bursts every ten minutes: each follows the scale-down after the last burst."""
    return 6.0 if time >= 600 and time % 600 < 60 else 0.3


def test_a_burst_soon_after_a_release_doubles_the_scale_down_window() -> None:
    fleet = FluidFleet.of(1, policy(), recurring).run(1190)
    assert fleet.sizes[-1] < max(fleet.sizes), "the first burst is followed by a release"
    fleet.run(610)
    assert fleet.state.scale_down_window.factor == 2
    # Until the third burst nothing is removed: its replicas are there.
    assert fleet.sizes[-1] == max(fleet.sizes[-100:])
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason in ("DemandJumped", "BacklogTooLong", "DemandGrew")


def test_a_slow_rise_after_a_release_keeps_the_scale_down_window() -> None:
    def load(time: float) -> float:
        return 5.0 if time < 600 else min(6.0, 2.0 + max(0.0, time - 1000) / 150)

    fleet = FluidFleet.of(8, policy(), load).run(1500)
    released = next(5 * i for i, (a, b) in enumerate(itertools.pairwise(fleet.sizes)) if 5 * i > 600 and b < a)
    grown = next(5 * i for i, (a, b) in enumerate(itertools.pairwise(fleet.sizes)) if released < 5 * i and b > a)
    assert grown - released <= fleet.policy.down_window
    assert fleet.state.scale_down_window.factor == 1


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(loads=st.lists(st.floats(0.0, 12.0), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_a_scale_down_leaves_enough_replicas_for_the_load(loads: list[float], seed: int) -> None:
    fleet = FluidFleet.of(8, policy(), lambda time: loads[int(time / 600) % 6], noise=0.1, seed=seed).run(3600)
    for i in range(1, len(fleet.sizes)):
        if fleet.sizes[i] < fleet.sizes[i - 1]:
            window = [decision.load for decision in fleet.decisions[max(0, i - 60) : i + 1]]
            known = [load for load in window if load is not None]  # unknown until the first requests
            assert fleet.sizes[i] >= max(known) / fleet.policy.down_utilization - 1e-6


def test_nothing_is_removed_while_a_backlog_exists() -> None:
    """The remaining replicas can drain the backlog within a second, although its arrival is outside the window."""
    hasty = policy(down_window=5.0)
    fleet = FluidFleet.of(4, hasty, lambda time: 0.3 if time < 600 or time >= 605 else 60.0, start=120.0).run(600)
    fleet.run(400)
    for before, after, made in zip(fleet.sizes, fleet.sizes[1:], fleet.backlogs[1:], strict=False):
        assert after >= before or made <= after * PROMPT_RATE, fleet.sizes
    assert max(fleet.backlogs) > 30 * PROMPT_RATE
    assert fleet.sizes[-1] < max(fleet.sizes)


# --- missing metrics


def all_silent(time: float, _: str) -> bool:
    return time > 1200


def test_nothing_changes_without_metrics() -> None:
    fleet = FluidFleet.of(4, policy(), lambda time: 2.5 if time <= 1200 else 0.0, silent=all_silent).run(3600)
    assert len(set(fleet.sizes[240:])) == 1
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == "MetricsStale"


@pytest.mark.parametrize(
    ("silent", "new", "words"),
    [
        (4, 0, "no ready replica has returned usable metrics for 15 s"),
        (3, 0, "more than half of 4 ready replicas have returned no usable metrics for 15 s"),
        (3, 3, "more than half of 4 ready replicas, not counting new ones, have returned no usable metrics for 15 s"),
    ],
)
def test_stale_metrics_are_counted_over_the_replicas_that_have_had_time_to_return_some(
    silent: int, new: int, words: str
) -> None:
    state = State()
    for time in (0.0, 5.0, 10.0, 30.0, 35.0):
        old = [f"chat-{n}" for n in range(4)]
        heard = old if time <= 10 else old[silent:]
        ready = [*old, *(f"new-{n}" for n in range(new if time > 30 else 0))]
        samples = {name: Sample(time=time if name in heard else 10.0) for name in old}
        fleet = Fleet(replicas=len(ready), ready=frozenset(ready), samples=samples)
        decision, state = recommend(policy(), state, fleet, time)
    assert decision.hold == Hold("MetricsStale", words)


def test_a_fleet_that_never_returned_metrics_is_held() -> None:
    fleet = FluidFleet.of(4, policy(), constant(2.5), silent=lambda *_: True).run(600)
    assert set(fleet.sizes) == {4}
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == "NoMetrics"


def test_a_replica_without_metrics_counts_as_the_mean_when_scaling_up() -> None:
    def one(time: float, pod: str) -> bool:
        return pod == "pod-1" and time > 600

    fleet = FluidFleet.of(4, policy(), lambda time: 3.0 if time < 900 else 3.9, silent=one).run(1500)
    assert fleet.sizes[100] == 4, "the silent replica must not change the measured load"
    assert fleet.sizes[-1] == math.ceil(3.9 / 0.85)


def test_a_replica_without_metrics_counts_as_full_when_scaling_down() -> None:
    def one(time: float, pod: str) -> bool:
        # Not one of the first replicas to be removed.
        return pod == "pod-6" and time > 1200

    loud = FluidFleet.of(6, policy(), lambda time: 4.0 if time <= 1200 else 1.3).run(3600)
    quiet = FluidFleet.of(6, policy(), lambda time: 4.0 if time <= 1200 else 1.3, silent=one).run(3600)
    assert quiet.sizes[-1] > loud.sizes[-1]


def test_a_replica_without_metrics_counts_as_full_only_while_it_has_none() -> None:
    def at_times(time: float, pod: str) -> bool:
        # Stale for ten seconds in each two minutes: more often than the scale-down window of five.
        return pod == "pod-6" and time % 120 < 25

    def load(time: float) -> float:
        return 4.0 if time <= 1200 else 1.3

    loud, quiet = (FluidFleet.of(6, policy(), load, silent=s).run(3600) for s in (lambda *_: False, at_times))
    assert quiet.sizes[-1] == loud.sizes[-1] == 2


def test_a_new_replica_does_not_inflate_the_load() -> None:
    """It has no metrics and no load yet: counting it with the mean load would cause a feedback loop."""
    born: dict[str, float] = {}

    def late(time: float, pod: str) -> bool:
        return time < born.setdefault(pod, time) + 10 and pod not in ("pod-1", "pod-2")

    fleet = FluidFleet.of(2, policy(), lambda time: 1.0 if time < 600 else 2.4, start=10.0, silent=late).run(1200)
    assert max(fleet.sizes) <= 4


# --- counters, capacity


@pytest.mark.parametrize("patience", [math.inf, 10.0], ids=["clients wait", "clients leave after 10 s"])
def test_clients_that_leave_do_not_hide_a_step(patience: float) -> None:
    def load(time: float) -> float:
        return 1.0 if time < 600 else 12.0

    fleet = FluidFleet.of(2, policy(), load, patience=patience).run(600)
    fleet.run(90)
    assert fleet.sizes[-1] >= 14


def test_five_replicas_one_of_them_three_times_slower_keep_their_size() -> None:
    even = FluidFleet.of(5, policy(max_replicas=16), constant(3.3)).run(2400)
    odd = FluidFleet.of(5, policy(max_replicas=16), constant(3.3), slow={"pod-2": 1 / 3}).run(2400)
    # The slow one is worth a third of a replica.
    assert max(odd.sizes) <= max(even.sizes) + 1
    (straggler,) = odd.state.speeds.stragglers
    assert straggler.pod == "pod-2"
    capacity = odd.state.speeds.capacity
    assert capacity == MeasuredCapacity(pytest.approx(RATE, rel=0.02), 512, "StepModel")


def test_the_queue_of_a_straggler_does_not_keep_the_fleet_large() -> None:
    """It never drains, and no other replica can take it over."""
    fleet = FluidFleet.of(6, policy(max_replicas=16), constant(2.2), slow={"pod-6": 1 / 3}).run(1800)
    assert fleet.backlogs[-1] > 10 * PROMPT_RATE
    # 2.2 / 0.79 for the load, and two thirds for the straggler.
    assert fleet.sizes[-1] == 4


# --- reasons and messages


def test_a_backlog_is_explained_in_tokens_seconds_and_replicas() -> None:
    idle = Sample(time=0.0, token_budget=BUDGET, kv_capacity_tokens=1e6, step_model=STEP)
    samples = dict.fromkeys(("a", "b"), idle)
    fleet = Fleet(replicas=2, ready=frozenset(samples), samples=samples, start_seconds=10.0)
    rules = policy()
    _, state = recommend(rules, State(), fleet, 0.0)
    for time in (5.0, 10.0, 15.0):
        fleet = replace(
            fleet,
            samples={
                name: replace(idle, time=time, arrived_tokens=18_000.0 * time, backlog_tokens=90_000.0)
                for name in samples
            },
        )
        made, state = recommend(rules, state, fleet, time)
    assert made.replicas > 2
    assert made.change is not None
    assert made.change.reason in ("BacklogTooLong", "DemandJumped")


def test_a_bound_is_reported_until_the_load_of_a_full_window_fits() -> None:
    few = policy(max_replicas=3)
    fleet = FluidFleet.of(3, few, lambda time: 5.0 if 600 <= time < 700 else 1.0).run(750)
    limit = fleet.decisions[-1].limit
    assert limit is not None
    assert (limit.reason, "maxReplicas, 3" in limit.message) == ("TooManyReplicas", True)
    fleet.run(900)
    assert fleet.decisions[-1].limit is None


def test_a_steady_load_gives_equal_decisions() -> None:
    fleet = FluidFleet.of(4, policy(), constant(3.0), noise=0.1).run(3600)
    assert all(made == fleet.decisions[-1] for made in fleet.decisions[-120:]), "each difference would cause a write"


def test_new_bounds_apply_immediately() -> None:
    fleet = FluidFleet.of(4, policy(), constant(3.0)).run(600)
    fleet.policy = policy(max_replicas=2)
    fleet.run(5)
    assert fleet.sizes[-1] == 2
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason == "BoundsChanged"
