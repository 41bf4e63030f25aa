"""The replay decides with the policy's own rules, and its fleet serves as the simulator's does."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import pytest
from benchmarks.autoscaling.device import A100_8B
from benchmarks.autoscaling.fleet import Cluster
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.replica import Engine, Targets
from benchmarks.autoscaling.results import figures
from benchmarks.autoscaling.simulation import Scenario, simulate
from benchmarks.autoscaling.traces import Trace, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.autoscale.measure.capacity import modelled
from fastgen_operator.autoscale.measure.rates import RequestSums
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal import replay as module
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, FleetReplay, replay, total
from fastgen_operator.autoscale.sample import Sample, StepCoefficients

HOUR = 3600 // SLOT_SECONDS
RATE = 8000.0
SUMS = RequestSums(ended=100.0, prompt=115_500.0, generated=21_100.0, computed=115_500.0)


def model(start: float = 60.0, **policy: float) -> FleetModel:
    """Return a fleet of up to 16 replicas of 8,000 tokens a second."""
    plain = Policy(min_replicas=1, max_replicas=16, derives_utilization=True)
    return FleetModel(
        policy=replace(plain, **policy),  # type: ignore[arg-type]
        tokens_per_second=RATE,
        start_seconds=start,
        requests=SUMS,
    )


def slots_of(trace: Trace, seed: int) -> tuple[list[float], RequestSums]:
    """Return the arriving tokens per second of a trace by slot, and its mean request."""
    arrivals = trace.arrivals(seed)
    tokens = [0.0] * int(trace.seconds // SLOT_SECONDS)
    for arrival in arrivals:
        if (slot := int(arrival.time // SLOT_SECONDS)) < len(tokens):
            tokens[slot] += arrival.prompt + arrival.generate
    prompt, generated = sum(each.prompt for each in arrivals), sum(each.generate for each in arrivals)
    return [count / SLOT_SECONDS for count in tokens], RequestSums(len(arrivals), prompt, generated, prompt)


@pytest.mark.parametrize("name", ["poisson", "bursts"])
@pytest.mark.parametrize("replicas", [4, 5])
def test_constant_fleets_serve_about_as_many_in_time_as_in_the_simulator(name: str, replicas: int) -> None:
    (trace,) = (trace for trace in traces(1.0, 600.0) if trace.name == name)
    rates, sums = slots_of(trace, seed=1)
    step = StepCoefficients(A100_8B.base, A100_8B.token, A100_8B.kv_token)
    sample = Sample(time=0.0, kv_capacity_tokens=A100_8B.kv_tokens, token_budget=A100_8B.token_budget, step_model=step)
    capacity = modelled(sample, sums.mean, 0.05, A100_8B.max_sequences)
    assert capacity is not None
    policy = Policy(min_replicas=replicas, max_replicas=replicas, derives_utilization=True)
    fleet = FleetModel(policy=policy, tokens_per_second=capacity, start_seconds=60.0, requests=sums)
    modelled_fleet = FleetReplay(fleet)
    modelled_fleet.begin(rates[0])
    outcome = total([modelled_fleet.serve(rate) for rate in rates][420 // SLOT_SECONDS :])
    engine = Engine(A100_8B, Targets(1.0, 0.05))
    run = simulate(Scenario(trace=trace, engine=engine, cluster=Cluster(), begin=replicas, seed=1), Fixed(replicas))
    assert outcome.attainment == pytest.approx(figures(run).attainment, abs=0.03)
    assert outcome.replica_seconds == replicas * 600


def test_the_fleet_grows_within_a_start_and_shrinks_after_the_window() -> None:
    fleet = FleetReplay(model())
    fleet.begin(RATE)
    sizes = []
    for slot in range(80):
        fleet.serve(4 * RATE if slot < 20 else RATE)
        sizes.append(fleet.replicas)
    assert sizes[0] > 2
    assert max(sizes) >= 6
    assert sizes[-1] == 2
    held = [slot for slot, size in enumerate(sizes) if size == max(sizes)]
    assert (held[-1] - 20) * SLOT_SECONDS >= 200, "the scale-down window holds them"


def test_a_burst_that_is_shorter_than_a_start_is_late_unless_the_floor_is_ready() -> None:
    rates: list[float | None] = [*[RATE] * 20, *[4 * RATE] * 4, *[RATE] * 40]
    assert replay(model(start=300.0), rates).attainment < 0.8
    assert replay(model(start=300.0).with_bounds(7, 16), rates).attainment > 0.99
    assert replay(model(start=300.0), rates).bursts == 1


@settings(max_examples=30)
@given(
    st.lists(st.floats(0, 12), min_size=1, max_size=60),
    st.integers(1, 12),
    st.sampled_from([10.0, 60.0, 300.0]),
)
def test_calm_slots_need_no_decision(loads: list[float], least: int, start: float) -> None:
    """The shortcut of calm slots changes no decision."""

    def sizes(*, asks: bool) -> list[int]:
        fleet = FleetReplay(model(start).with_bounds(least, 16))
        with pytest.MonkeyPatch.context() as patch:
            if asks:
                patch.setattr(FleetReplay, "_is_calm", lambda _: False)
            fleet.begin(loads[0] * RATE)
            found = []
            for load in loads:
                fleet.serve(load * RATE)
                found.append(fleet.replicas)
        return found

    assert sizes(asks=False) == sizes(asks=True)


@settings(max_examples=30)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=80), st.integers(1, 16))
def test_any_arrivals_can_be_replayed(rates: list[float | None], least: int) -> None:
    outcome = replay(model().with_bounds(least, 16), rates)
    known = sum(rate is not None for rate in rates)
    assert 0 <= outcome.attainment <= 1
    assert outcome.seconds <= known * SLOT_SECONDS
    assert least * outcome.seconds <= outcome.replica_seconds <= 16 * outcome.seconds
    assert math.isfinite(outcome.tokens)


def test_prompts_that_are_all_cached_can_be_replayed() -> None:
    cached = replace(model(), requests=RequestSums(ended=100.0, prompt=1000.0, cached=1000.0))
    assert cached.requests.work_per_prompt_token == 0
    assert replay(cached, [0.5 * RATE] * 10 + [10 * RATE] * 10).bursts == 1


def test_replays_of_fleets_of_any_size_keep_little_memory() -> None:
    tracemalloc.start()
    try:
        for count in range(1001):
            module._names(count)
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_unknown_hour_is_neither_served_nor_paid() -> None:
    known: list[float | None] = [RATE] * HOUR
    gap: list[float | None] = [None] * HOUR
    with_gap, without = replay(model(), known + gap + known), replay(model(), known + known)
    assert with_gap.seconds == without.seconds - module._SETTLING_SLOTS * SLOT_SECONDS
    assert with_gap.attainment == pytest.approx(without.attainment)


def test_the_retries_after_an_outage_are_not_counted() -> None:
    calm: list[float | None] = [RATE] * HOUR
    outage: list[float | None] = [None] * 20
    storm: list[float | None] = [RATE, RATE, *[10 * RATE] * 4]
    assert replay(model(), calm + outage + storm + calm).bursts == 0
    assert replay(model(), calm + storm + calm).bursts == 1


def test_a_missed_slot_does_not_interrupt_a_burst() -> None:
    burst: list[float | None] = [*[RATE] * 20, *[4 * RATE] * 3, None, *[4 * RATE] * 3, *[RATE] * 40]
    found = replay(model(), burst)
    assert found.bursts == 1
    assert found.seconds == (len(burst) - 1) * SLOT_SECONDS


def test_the_first_slots_after_a_restart_count_only_if_nothing_came_before() -> None:
    assert replay(model(), [RATE] * 10).seconds == 10 * SLOT_SECONDS
    assert replay(model(), [None] * 10 + [RATE] * 10).seconds == 0
