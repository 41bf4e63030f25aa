"""The learned lower bound: found where bursts recur, absent without clear evidence, slow, and never below the rules."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.measure.rates import RequestSums
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, Arrivals
from fastgen_operator.autoscale.rehearsal.learning import LOWER_AFTER, Learning, Rehearsal, learn, with_learned_floor
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, replay
from harness.fluid import FluidFleet, policy

HOUR = 3600 // SLOT_SECONDS
RATE = 8000.0
SUMS = RequestSums(ended=100.0, prompt=115_500.0, generated=21_100.0, computed=115_500.0)
BEGIN = 1.7e9 - 1.7e9 % SLOT_SECONDS

Rates = list[float | None]


def calm(hours: float) -> Rates:
    """Return a load of 1.5 replicas."""
    return [1.5 * RATE] * round(hours * HOUR)


def bursts(hours: float, high: float = 4.1) -> Rates:
    """Return a load of 1 replica with bursts of two minutes every ten minutes."""
    period: Rates = [*[RATE] * 32, *[high * RATE] * 8]
    return (period * (round(hours * HOUR) // len(period) + 1))[: round(hours * HOUR)]


def rehearsal(rates: Rates, before: int = 0, lower: int = 0, start: float = 60.0, **changes: float) -> Rehearsal:
    arrivals = Arrivals()
    for slot, rate in enumerate([*rates, None]):
        arrivals = arrivals.add(BEGIN + slot * SLOT_SECONDS, rate)
    rules = replace(Policy(min_replicas=1, max_replicas=16, derives_utilization=True), **changes)  # type: ignore[arg-type]
    fleet = FleetModel(policy=rules, tokens_per_second=RATE, start_seconds=start, requests=SUMS)
    return Rehearsal(model=fleet, arrivals=arrivals.encode(), before=before, lower=lower)


def settled(rates: Rates, before: int = 0, **options: float) -> Learning:
    """Return what is learned when the same arrivals are rehearsed until that changes nothing."""
    learning, seen = Learning(floor=before), set[tuple[int, int]]()
    while (learning.floor, learning.lower) not in seen:
        seen.add((learning.floor, learning.lower))
        learning = learn(rehearsal(rates, learning.floor, learning.lower, **options))
    return learning


def test_bursts_that_are_shorter_than_a_start_get_the_cheapest_floor_that_serves_them() -> None:
    rates = bursts(4)
    learning = settled(rates)
    assert learning.verdict == "Clear"
    fleet = rehearsal(rates).model
    attained = {floor: replay(fleet.with_bounds(floor, 16), rates[: 2 * HOUR]).attainment for floor in range(1, 10)}
    cheapest = min(floor for floor, share in attained.items() if share >= 0.99)
    assert learning.floor == cheapest
    assert attained[1] < 0.95


def test_the_message_names_the_evidence_the_start_and_the_cost() -> None:
    learning = settled(bursts(4))
    pattern = (
        r"at least {0} replicas: in the last 2\.0 h, the present settings serve \d\d\.\d % of the requests in time for "
        r"\d+\.\d replica-hours; the target is 99 %; requests are late in \d+ bursts, because a replica takes 60 s to "
        r"start; at least {0} replicas would serve 99\.\d % for \d+\.\d replica-hours"
    )
    assert re.fullmatch(pattern.format(learning.floor), learning.message)
    assert len(learning.message) <= 1024


@pytest.mark.parametrize("high", [2.0, 4.0])
def test_higher_bursts_get_a_higher_floor(high: float) -> None:
    assert settled(bursts(4, high)).floor <= settled(bursts(4, high + 2)).floor


def test_starts_that_are_shorter_than_the_bursts_need_no_higher_floor_than_long_ones() -> None:
    assert settled(bursts(4), start=5.0).floor <= settled(bursts(4), start=120.0).floor


def test_a_steady_load_teaches_nothing() -> None:
    learning = settled(calm(6))
    assert (learning.floor, learning.verdict) == (0, "Sufficient")
    assert "the present settings serve 99." in learning.message


def test_nothing_is_learned_from_less_than_two_hours() -> None:
    learning = settled(bursts(1.9))
    assert (learning.floor, learning.verdict) == (0, "TooLittleKnown")
    assert "1.9 h are known; 2 h are needed" in learning.message
    assert learn(rehearsal(bursts(1.9), before=5)).floor == 5, "and nothing is unlearned"


def test_a_floor_is_forgotten_when_the_bursts_end() -> None:
    learned = settled(bursts(4)).floor
    assert learned > 2
    assert settled(bursts(3) + calm(3), before=learned).floor == 0


def test_new_bursts_are_learned_after_some_hours() -> None:
    assert settled(calm(6)).floor == 0
    assert settled(calm(2) + bursts(4)).floor > 2


def test_one_burst_is_no_evidence_however_high() -> None:
    once = calm(3) + [60 * RATE] * 8 + calm(3)
    assert settled(once[-6 * HOUR :]).floor == 0
    burst: Rates = [6 * RATE] * 8
    twice = [*calm(1), *burst, *calm(4), *burst, *calm(0.9)]
    assert settled(twice[-6 * HOUR :]).floor == 0, "one in each half"
    often = [*calm(1), *burst, *calm(0.5), *burst, *calm(2), *burst, *calm(0.5), *burst, *calm(0.9)]
    assert settled(often[-6 * HOUR :]).floor > 0


def test_an_outage_a_restart_and_gaps_teach_nothing() -> None:
    outage: Rates = [None] * HOUR
    # The clients of the outage try again, all at once.
    storm: Rates = [12 * RATE] * 12
    assert settled([*calm(1.5), *outage, *storm, *calm(1.5), *outage, *storm, *calm(1)][-6 * HOUR :]).floor == 0
    draw = random.Random(1)
    assert settled([rate if draw.random() < 0.5 else None for rate in calm(6)]).floor == 0
    # Half of the scrapes of a fleet with bursts fail: its floor is about the same.
    gaps: Rates = [rate if draw.random() < 0.7 else None for rate in bursts(6)]
    assert abs(settled(gaps).floor - settled(bursts(6)).floor) <= 1


def test_a_fleet_that_was_stopped_for_an_hour_keeps_what_it_has_learned() -> None:
    stopped: Rates = [0.0] * HOUR
    assert settled([*bursts(3), *stopped, *bursts(2)]).floor == settled(bursts(6)).floor


@settings(max_examples=12)
@given(st.integers(0, 16), st.integers(0, LOWER_AFTER - 1), st.sampled_from(["calm", "bursts", "few"]))
def test_the_floor_changes_slowly(before: int, lower: int, load: str) -> None:
    rates = {"calm": calm(2.5), "bursts": bursts(2.5), "few": bursts(1)}[load]
    after = learn(rehearsal(rates, before, lower)).floor
    current = max(1, before)
    assert max(1, after) <= current + max(1, current // 2)
    assert max(1, after) >= current - 1
    if lower < LOWER_AFTER - 1:
        assert max(1, after) >= current


def test_a_lower_floor_must_be_found_three_times_in_a_row() -> None:
    learning = Learning(floor=4)
    floors = []
    for _ in range(2 * LOWER_AFTER):
        learning = learn(rehearsal(calm(3), learning.floor, learning.lower))
        floors.append(learning.floor)
    assert floors == [4, 4, 3, 3, 3, 2]


def test_the_floor_is_within_the_bounds() -> None:
    assert settled(bursts(4), max_replicas=3).floor <= 3
    assert settled(bursts(4), min_replicas=8).floor == 0, "minReplicas suffices"
    assert with_learned_floor(Policy(min_replicas=1, max_replicas=3), 9).min_replicas == 3
    zero = Policy(min_replicas=0, max_replicas=3)
    assert with_learned_floor(zero, 2) == zero


@pytest.mark.parametrize("hours", [1, 4])
def test_a_floor_follows_changed_bounds_at_once(hours: float) -> None:
    assert learn(rehearsal(bursts(hours), before=60, max_replicas=10)).floor == 10
    assert learn(rehearsal(bursts(hours), before=60, min_replicas=4, max_replicas=4)).floor == 0
    message = learn(rehearsal(bursts(hours), before=60, max_replicas=10)).message
    assert message.startswith("at least 10 replicas")
    assert learn(rehearsal(bursts(hours), before=5, min_replicas=8)).floor == 0, "minReplicas suffices"


def test_a_lower_wanted_attainment_is_cheaper() -> None:
    assert settled(bursts(4), attainment=0.9).floor <= settled(bursts(4), attainment=0.99).floor


@settings(max_examples=15)
@given(st.integers(0, 12), st.sampled_from(["Advise", "Apply"]), st.floats(0.2, 6.0), st.integers(60, 400))
def test_decisions_are_never_below_those_of_the_other_rules(floor: int, mode: str, load: float, seconds: int) -> None:
    rules = policy(min_replicas=1, max_replicas=10)
    fleet = FluidFleet.of(2, rules, lambda time: load if time > 100 else 1.0)
    fleet.run(seconds)
    plain = Case(policy=rules, fleet=fleet.observed(), now=fleet.time + 1, state=fleet.state)
    learned = replace(plain, learned=floor, policy=replace(rules, learning=mode))  # type: ignore[arg-type]
    without, _ = decide(plain)
    decision, _ = decide(learned)
    if mode == "Advise":
        assert decision == without
        return
    assert decision.replicas >= without.replicas
    assert min(floor, 10) <= decision.replicas <= 10
    if decision.replicas > without.replicas:
        assert decision.change is not None
        assert decision.change.reason == "FloorLearned"


def test_a_limit_says_that_the_past_requires_more_than_the_load() -> None:
    rules = replace(policy(min_replicas=1, max_replicas=10), learning="Apply")
    fleet = FluidFleet.of(2, rules, lambda _: 0.5)
    fleet.run(600)
    case = Case(policy=rules, fleet=fleet.observed(), now=fleet.time + 1, state=fleet.state, learned=4)
    decision, _ = decide(case)
    assert decision.limit is not None
    expected = "the load requires fewer: the load of the last hours requires at least 4 replicas"
    assert (decision.limit.reason, decision.limit.message) == ("TooFewReplicas", expected)


def test_a_new_leader_continues_from_the_status() -> None:
    learning = settled(bursts(4))
    again = Learning.from_status(learning.to_status())
    assert (again.floor, again.arrivals) == (learning.floor, learning.arrivals)
    nothing = settled(calm(4))
    assert "minReplicas" not in nothing.to_status()
    assert Learning.from_status(nothing.to_status()).floor == 0
