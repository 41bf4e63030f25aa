"""The autoscaler's decisions: what they do with load, noise, silence and restarts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastgen_operator.autoscale import decision as words
from fastgen_operator.autoscale.averages import Peaks
from fastgen_operator.autoscale.capacity import RequestShape, fleet_capacity, modelled
from fastgen_operator.autoscale.demand import flow_between
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.recommend import State, recommend
from harness.fluid import BUDGET, GENERATED, PROMPT, PROMPT_RATE, RATE, FluidFleet, policy

SHAPE = RequestShape(PROMPT, PROMPT, GENERATED)


def constant(load: float) -> Callable[[float], float]:
    return lambda _: load


def settled(load: float, replicas: int, **options: float) -> FluidFleet:
    """A fleet that has had that load for longer than any window."""
    return FluidFleet.of(replicas, policy(), constant(load), **options).run(1200)


@settings(max_examples=10, deadline=None)
@given(
    load=st.floats(0.0, 12.0),
    first=st.integers(1, 12),
    start=st.floats(5.0, 300.0),
    noise=st.floats(0.0, 0.1),
    seed=st.integers(0, 1000),
)
def test_a_constant_load_reaches_a_fixed_size_and_stays_for_any_noise_and_start(
    load: float, first: int, start: float, noise: float, seed: int
) -> None:
    # Long enough for 12 replicas to leave one step a minute, after the windows.
    fleet = FluidFleet.of(first, policy(), constant(load), start=start, noise=noise, seed=seed).run(2700)
    last = fleet.sizes[-180:]
    # Where noise lies just at the edge of a step, the step down may come late; after it there is no way back up.
    assert last == sorted(last, reverse=True), fleet.sizes
    assert last[0] - last[-1] <= 1, fleet.sizes
    assert last[-1] >= load, "the fleet cannot take its load"
    assert last[-1] <= max(1, math.ceil(load * (1 + 2 * noise) / 0.70) + 1), "more than the load needs"


@settings(max_examples=10, deadline=None)
@given(
    loads=st.lists(st.floats(0.0, 30.0), min_size=4, max_size=4),
    least=st.integers(1, 5),
    span=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_a_fleet_never_leaves_its_bounds(loads: list[float], least: int, span: int, seed: int) -> None:
    bounds = policy(min_replicas=least, max_replicas=least + span)
    fleet = FluidFleet.of(least, bounds, lambda time: loads[int(time / 150) % 4], noise=0.1, seed=seed).run(900)
    assert least <= min(fleet.sizes)
    assert max(fleet.sizes) <= least + span


@settings(max_examples=8, deadline=None)
@given(load=st.floats(0.1, 10.0), more=st.floats(0.0, 10.0))
def test_more_load_never_means_fewer_replicas(load: float, more: float) -> None:
    assert settled(load + more, 3).sizes[-1] >= settled(load, 3).sizes[-1]


@settings(max_examples=8, deadline=None)
@given(load=st.floats(0.2, 6.0), seed=st.integers(0, 1000))
def test_a_restart_of_the_operator_changes_nothing(load: float, seed: int) -> None:
    # Not where noise alone could bring about a late step down: see above.
    assume(math.ceil(load * 1.1 / 0.70) == math.ceil(load * 0.95 / 0.70))
    fleet = FluidFleet.of(3, policy(), constant(load), noise=0.1, seed=seed).run(2400)
    before = fleet.sizes[-1]
    assert len(set(fleet.sizes[-60:])) == 1
    fleet.state = State()
    fleet.samples.clear()
    fleet.run(900)
    assert set(fleet.sizes[-180:]) == {before}


def test_a_restart_in_a_lull_takes_nothing_away_before_a_whole_window() -> None:
    fleet = FluidFleet.of(10, policy(), lambda time: 8.0 if time < 1000 else 0.5).run(1010)
    before = fleet.sizes[-1]
    fleet.state = State()
    fleet.run(295)
    assert set(fleet.sizes[-59:]) == {before}
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == words.HOLD_AFTER_RESTART
    fleet.run(200)
    assert fleet.sizes[-1] < before


@pytest.mark.parametrize("start", [10.0, 60.0, 600.0])
def test_pending_pods_are_supply_so_a_slow_start_does_not_run_away(start: float) -> None:
    fleet = FluidFleet.of(1, policy(), lambda time: 0.5 if time < 300 else 4.0, start=start).run(300 + 6 * start + 600)
    # What came during the start waits as well, and is drained within another one: twice the load, not more.
    assert max(fleet.sizes) <= 2 * 4
    assert fleet.sizes[-1] >= 4


@pytest.mark.parametrize(("load", "most"), [(1.5, 3), (2.0, 4), (3.0, 6)])
def test_pods_that_never_start_do_not_bring_about_more_and_more(load: float, most: int) -> None:
    """The backlog grows until the queue is full; the fleet that is wanted stays within twice the load."""
    fleet = FluidFleet.of(1, policy(), lambda time: 0.5 if time < 300 else load, never_start=True).run(2100)
    assert len(fleet.observed().ready) == 1
    assert fleet.sizes[-1] >= load
    assert max(fleet.sizes) <= most


def test_a_burst_that_is_over_before_a_pod_could_start_adds_none() -> None:
    def burst(time: float) -> float:
        return 1.5 if 600 <= time < 605 else 0.4

    fleet = FluidFleet.of(1, policy(), burst, start=120.0).run(1200)
    assert set(fleet.sizes) == {1}


def test_a_jump_is_acted_on_within_two_scrapes() -> None:
    fleet = FluidFleet.of(1, policy(), lambda time: 0.3 if time <= 600 else 5.0).run(600)
    fleet.run(2 * fleet.policy.scrape_seconds)
    assert fleet.sizes[-1] > 1
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason in (words.DEMAND_JUMPED, words.BACKLOG_TOO_LONG)


def test_a_scale_down_takes_a_quarter_a_minute_at_most() -> None:
    fleet = FluidFleet.of(20, policy(), lambda time: 14.0 if time < 600 else 1.0).run(3000)
    steps = [(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(fleet.sizes)) if b < a]
    assert steps
    assert all(before - after <= max(1, before // 4) for _, before, after in steps)
    assert all(5 * (later[0] - earlier[0]) >= 60 for earlier, later in itertools.pairwise(steps))


@settings(max_examples=8, deadline=None)
@given(loads=st.lists(st.floats(0.0, 12.0), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_a_scale_down_leaves_what_holds_the_load(loads: list[float], seed: int) -> None:
    fleet = FluidFleet.of(8, policy(), lambda time: loads[int(time / 600) % 6], noise=0.1, seed=seed).run(3600)
    for i in range(1, len(fleet.sizes)):
        if fleet.sizes[i] < fleet.sizes[i - 1]:
            window = [decision.load for decision in fleet.decisions[max(0, i - 60) : i + 1]]
            assert fleet.sizes[i] >= max(window) / 0.70 - 1e-6


def test_nothing_is_taken_away_from_a_backlog() -> None:
    """Who stays drains within a second what waits, though the window has long forgotten what came."""
    hasty = policy(down_window=5.0)
    fleet = FluidFleet.of(4, hasty, lambda time: 0.3 if time < 600 or time >= 605 else 60.0, start=120.0).run(600)
    fleet.run(400)
    for before, after, made in zip(fleet.sizes, fleet.sizes[1:], fleet.backlogs[1:], strict=False):
        assert after >= before or made <= after * PROMPT_RATE, fleet.sizes
    assert max(fleet.backlogs) > 30 * PROMPT_RATE
    assert fleet.sizes[-1] < max(fleet.sizes)


# --- silence


def everyone(time: float, _: str) -> bool:
    return time > 1200


def test_without_any_data_nothing_changes() -> None:
    fleet = FluidFleet.of(4, policy(), lambda time: 2.5 if time <= 1200 else 0.0, silent=everyone).run(3600)
    assert len(set(fleet.sizes[240:])) == 1
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == words.METRICS_STALE


def test_a_fleet_that_never_said_anything_is_left_alone() -> None:
    fleet = FluidFleet.of(4, policy(), constant(2.5), silent=lambda *_: True).run(600)
    assert set(fleet.sizes) == {4}
    hold = fleet.decisions[-1].hold
    assert hold is not None
    assert hold.reason == words.NO_METRICS


def test_one_silent_replica_counts_as_the_mean_when_going_up() -> None:
    def one(time: float, pod: str) -> bool:
        return pod == "pod-1" and time > 600

    fleet = FluidFleet.of(4, policy(), lambda time: 3.0 if time < 900 else 3.9, silent=one).run(1500)
    assert fleet.sizes[100] == 4, "the missing one made the load look larger or smaller"
    assert fleet.sizes[-1] == math.ceil(3.9 / 0.85)


def test_one_silent_replica_counts_as_full_when_going_down() -> None:
    def one(time: float, pod: str) -> bool:
        # Not among the first that are taken away.
        return pod == "pod-6" and time > 1200

    loud = FluidFleet.of(6, policy(), lambda time: 4.0 if time <= 1200 else 1.3).run(3600)
    quiet = FluidFleet.of(6, policy(), lambda time: 4.0 if time <= 1200 else 1.3, silent=one).run(3600)
    assert quiet.sizes[-1] > loud.sizes[-1]


def test_a_replica_that_is_new_does_not_make_the_load_look_larger() -> None:
    """It has said nothing yet, and does nothing yet: to take it for an average one would be growth by growing."""
    born: dict[str, float] = {}

    def late(time: float, pod: str) -> bool:
        return time < born.setdefault(pod, time) + 10 and pod not in ("pod-1", "pod-2")

    fleet = FluidFleet.of(2, policy(), lambda time: 1.0 if time < 600 else 2.4, start=10.0, silent=late).run(1200)
    assert max(fleet.sizes) <= 4


# --- counters, capacity


def test_a_counter_that_fell_began_anew() -> None:
    before = Sample(time=0.0, prefill_tokens=1e6, decode_tokens=1e5, backlog_tokens=5000, token_budget=512)
    after = Sample(time=10.0, prefill_tokens=2000, decode_tokens=100, backlog_tokens=1000, token_budget=512)
    flow = flow_between(before, after)
    assert (flow.computed, flow.decoded, flow.arriving) == (200, 10, 300)


def test_what_arrives_is_what_was_computed_or_cached_and_what_the_backlog_grew_by() -> None:
    before = Sample(time=0.0, prefill_tokens=1000, cached_tokens=0, backlog_tokens=100)
    after = Sample(time=10.0, prefill_tokens=3000, cached_tokens=500, backlog_tokens=1100)
    assert flow_between(before, after).arriving == (2000 + 500 + 1000) / 10


def sample(**values: object) -> Sample:
    plain = Sample(time=0.0, token_budget=BUDGET, kv_capacity_tokens=1e6, step_model=(0.02, 0.0001, 0.0))
    return replace(plain, **values)  # type: ignore[arg-type]


def test_capacity_is_the_full_pass_where_nothing_else_bounds_it() -> None:
    assert modelled(sample(), SHAPE, 1.0, 1000) == pytest.approx(RATE)


def test_capacity_shrinks_to_passes_that_meet_the_inter_token_target() -> None:
    # 30 ms leave 10 ms for tokens: 100 of them.
    assert modelled(sample(), SHAPE, 0.03, 1000) == pytest.approx(100 / 0.03)


def test_a_target_that_no_pass_meets_bounds_nothing() -> None:
    assert modelled(sample(), SHAPE, 0.01, 1000) == pytest.approx(RATE)


def test_capacity_is_bounded_by_sequences_and_by_the_kv_cache() -> None:
    per_sequence = 1 + PROMPT / GENERATED
    ten = 10 * per_sequence / (0.02 + 0.0001 * 10 * per_sequence)
    assert modelled(sample(), SHAPE, 1.0, 10) == pytest.approx(ten)
    room = 10 * (PROMPT + GENERATED / 2) / 0.8
    assert modelled(sample(kv_capacity_tokens=room), SHAPE, 1.0, 1000) == pytest.approx(ten)


def test_a_model_of_passes_of_one_size_is_not_believed() -> None:
    assert modelled(sample(step_model=(0.0, 0.01, 0.0)), SHAPE, 1.0, 100) is None
    assert modelled(sample(step_model=(0.0, 0.01, 1e-6)), SHAPE, 1.0, 100) is not None, "a fit of several sizes"
    found = fleet_capacity([sample(step_model=(0.0, 0.0, 0.0))], SHAPE, 700.0, 1.0, 100)
    assert found is not None
    assert (found.tokens_per_second, found.source) == (700.0, "Throughput")


def test_a_model_that_promises_more_than_was_seen_is_not_believed() -> None:
    found = fleet_capacity([sample()], SHAPE, RATE / 2, 1.0, 1000)
    assert found is not None
    assert (found.tokens_per_second, found.source) == (RATE / 2, "Throughput")


def test_one_odd_replica_does_not_change_the_capacity() -> None:
    odd = sample(step_model=(50.0, 1.0, 0.0))
    found = fleet_capacity([sample(), odd, sample()], SHAPE, None, 0.2, 1000)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(RATE)


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 100)), max_size=60), st.floats(1, 500))
def test_peaks_hold_at_least_the_largest_of_the_window_and_few_marks(
    steps: list[tuple[float, float]], window: float
) -> None:
    peaks, now, seen = Peaks(), 0.0, []
    for seconds, value in steps:
        now += seconds
        seen.append((now, value))
        peaks = peaks.add(now, value, window)
        assert peaks.largest >= max(value for time, value in seen if time > now - window)
        assert peaks.largest <= max(value for time, value in seen if time > now - 1.02 * window - 1e-6)
    assert len(peaks.marks) <= 103


# --- words


def test_a_backlog_is_explained_in_tokens_seconds_and_replicas() -> None:
    samples = {name: sample(backlog_tokens=0.0) for name in ("a", "b")}
    fleet = Fleet(wanted=2, ready=frozenset(samples), samples=samples, start_seconds=10.0)
    rules = policy()
    _, state = recommend(rules, State(), fleet, 0.0)
    for time in (5.0, 10.0, 15.0):
        fleet = replace(
            fleet, samples={name: replace(sample(), time=time, backlog_tokens=60_000.0) for name in samples}
        )
        made, state = recommend(rules, state, fleet, time)
    assert made.replicas > 2
    assert made.change is not None
    assert made.change.reason in (words.BACKLOG_TOO_LONG, words.DEMAND_JUMPED)


def test_a_bound_that_limits_is_said_until_the_load_of_a_whole_window_fits() -> None:
    few = policy(max_replicas=3)
    fleet = FluidFleet.of(3, few, lambda time: 5.0 if 600 <= time < 700 else 1.0).run(750)
    limit = fleet.decisions[-1].limit
    assert limit is not None
    assert (limit.reason, "maxReplicas, 3" in limit.message) == (words.TOO_MANY_REPLICAS, True)
    fleet.run(900)
    assert fleet.decisions[-1].limit is None


def test_a_steady_load_gives_the_same_decision_again_and_again() -> None:
    fleet = FluidFleet.of(4, policy(), constant(3.0), noise=0.1).run(3600)
    assert all(made == fleet.decisions[-1] for made in fleet.decisions[-120:]), "each would be a write"


def test_new_bounds_hold_at_once() -> None:
    fleet = FluidFleet.of(4, policy(), constant(3.0)).run(600)
    fleet.policy = policy(max_replicas=2)
    fleet.run(5)
    assert fleet.sizes[-1] == 2
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason == words.BOUNDS_CHANGED
