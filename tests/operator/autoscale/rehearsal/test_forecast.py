"""Bounds from earlier days: found where a load rises faster than replicas start, absent elsewhere, never too high."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.measure.rates import RequestSums
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS
from fastgen_operator.autoscale.rehearsal.codes import encoded
from fastgen_operator.autoscale.rehearsal.days import Calendar, Days, History
from fastgen_operator.autoscale.rehearsal.forecast import AHEAD_BINS, BEHIND_BINS, FloorPlan, Forecast, forecast
from fastgen_operator.autoscale.rehearsal.learning import Rehearsal, learn, with_learned_floor
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, FleetReplay, replay
from harness.fluid import FluidFleet, policy

CALENDAR = Calendar()
DAY = CALENDAR.bins
RATE = 8000.0
SUMS = RequestSums(ended=100.0, prompt=115_500.0, generated=21_100.0, computed=115_500.0)
MODEL = FleetModel(
    policy=Policy(min_replicas=1, max_replicas=16, derives_utilization=True),
    tokens_per_second=RATE,
    start_seconds=300.0,
    requests=SUMS,
)
# Midnight before a Monday.
MONDAY = 20_003 * DAY
# At nine, the load rises from one replica to six.
OPENING = 9 * 12

Rates = list[float | None]


def office(low: float = 0.3, high: float = 5.0, opening: int = OPENING) -> Rates:
    """Return a workday."""
    return [(high if opening <= number < 18 * 12 else low) * RATE for number in range(DAY)]


def seen(days: list[Rates], hour: float, today: Rates | None = None, begin: int = MONDAY) -> History:
    """Return the history at an hour of the day after `days`. Unless given, that day is like the last one."""
    rates = [rate for day in days for rate in day]
    rates += (today or days[-1])[: round(12 * hour)]
    return History(CALENDAR, begin + len(rates), rates)


def wanted(load: float) -> int:
    """Return the replicas for a load in replicas."""
    return math.ceil(load / MODEL.utilization)


def test_days_begin_on_a_monday() -> None:
    assert [CALENDAR.is_weekend(MONDAY + day * DAY) for day in range(7)] == [False] * 5 + [True] * 2


def test_a_rise_of_every_day_is_expected_one_start_ahead() -> None:
    found = forecast(MODEL, seen([office()] * 3, 8.5))
    assert found.verdict == "Clear"
    assert found.planned.attainment > found.present.attainment
    now = MONDAY + 3 * DAY + 12 * 8.5
    until_opening = OPENING - round(12 * 8.5)
    floors = found.plan.floors
    assert (found.plan.begin, len(floors)) == (now, AHEAD_BINS)
    ahead = math.ceil(MODEL.start_seconds / CALENDAR.bin_seconds) + 1
    assert [floor > 1 for floor in floors[:until_opening]] == [False] * (until_opening - ahead) + [True] * ahead
    assert floors[until_opening] == wanted(5.0)
    assert set(floors) == {0, wanted(5.0)}


def test_the_bounds_serve_the_rise_that_the_rules_miss() -> None:
    before = seen([office()] * 3, 8.0)
    plan = forecast(MODEL, before).plan
    slots = CALENDAR.bin_seconds // SLOT_SECONDS
    coming = [rate for rate in office()[8 * 12 : 10 * 12] for _ in range(slots)]
    present = replay(MODEL, coming)
    planned = replay(MODEL, coming, [floor for floor in plan.floors for _ in range(slots)])
    assert present.attainment < 0.9 < 0.98 < planned.attainment


def test_the_plan_stays_while_the_load_rises() -> None:
    for minute in range(-60, 30, 5):
        found = forecast(MODEL, seen([office()] * 3, 9 + minute / 60))
        assert found.verdict == "Clear", minute
        assert found.plan.highest == wanted(5.0)


@pytest.mark.parametrize("hour", [1.0, 5.0, 13.0, 16.0, 23.0])
def test_hours_in_which_the_rules_suffice_have_no_bounds(hour: float) -> None:
    assert forecast(MODEL, seen([office()] * 3, hour)).verdict == "Sufficient"


def test_a_slow_day_and_fast_starts_need_no_bounds() -> None:
    slow: Rates = [RATE * (3 - 2 * math.cos(2 * math.pi * number / DAY)) for number in range(DAY)]
    assert all(forecast(MODEL, seen([slow] * 3, hour)).plan == FloorPlan() for hour in range(24))


def test_one_day_is_no_evidence() -> None:
    assert forecast(MODEL, seen([office()], 8.5)).verdict == "TooLittleKnown"
    assert forecast(MODEL, seen([], 8.5, office())) == Forecast()
    assert forecast(MODEL, History(CALENDAR, 0, [])) == Forecast()
    quiet: Rates = [0.3 * RATE] * DAY
    assert forecast(MODEL, seen([quiet, office()], 8.5, office())).plan == FloorPlan(), "the day before had none"
    assert forecast(MODEL, seen([office(), quiet], 8.5)).plan == FloorPlan(), "and it was gone on the last day"


def test_times_that_are_known_of_one_day_have_no_bounds() -> None:
    until_ten = [rate if number < 10 * 12 else None for number, rate in enumerate(office())]
    found = forecast(MODEL, seen([until_ten, office()], 8.5))
    known = 12 + 6
    assert found.plan.floors[:known][-1] == wanted(5.0)
    assert found.plan.floors[known:] == (0,) * (AHEAD_BINS - known)


def test_a_rise_that_ends_is_forgotten_after_a_day() -> None:
    quiet: Rates = [0.3 * RATE] * DAY
    assert forecast(MODEL, seen([*[office()] * 4, quiet], 8.5)).plan == FloorPlan()


def test_bounds_that_would_not_have_helped_the_last_day_are_not_planned() -> None:
    at_nine, at_eleven = (
        [(5.0 if 12 * hour <= number < 12 * (hour + 1) else 0.3) * RATE for number in range(DAY)] for hour in (9, 11)
    )
    assert forecast(MODEL, seen([at_nine, at_nine, at_nine], 9.5)).verdict == "Clear"
    found = forecast(MODEL, seen([at_nine, at_nine, at_eleven], 9.5, at_nine))
    assert (found.verdict, found.plan) == ("Unclear", FloorPlan())
    assert found.planned.replica_seconds > found.present.replica_seconds, "there were bounds, at another time"


def test_a_day_with_less_load_has_lower_bounds() -> None:
    holiday: Rates = [0.1 * RATE] * DAY
    usual = forecast(MODEL, seen([office()] * 3, 8.5)).plan.highest
    found = forecast(MODEL, seen([office()] * 3, 8.5, holiday)).plan
    assert found.highest == wanted(5.0 * 0.1 / 0.3) < usual
    later = forecast(MODEL, seen([office()] * 3, 10.0, holiday)).plan
    assert later.highest <= 1, "at ten the day is known to differ"


def test_a_day_with_more_load_has_no_higher_bounds() -> None:
    busy: Rates = [4 * RATE] * DAY
    assert forecast(MODEL, seen([office()] * 3, 8.5, busy)).plan.highest == wanted(5.0)


def test_a_weekend_is_expected_to_be_one_and_a_monday_is_not() -> None:
    weekend: Rates = [0.3 * RATE] * DAY
    week = [*[office()] * 5, weekend, weekend]
    assert forecast(MODEL, seen(week, 8.5, office())).plan.highest == wanted(5.0), "on Monday, as on Friday"
    on_saturday = forecast(MODEL, seen([*week, *week[:5]], 8.5, weekend))
    assert on_saturday.plan == FloorPlan()


def test_the_first_weekend_has_no_bounds() -> None:
    assert forecast(MODEL, seen([office()] * 5, 8.5)).plan == FloorPlan()


def test_an_outage_or_a_storm_of_retries_on_one_day_changes_nothing() -> None:
    usual = forecast(MODEL, seen([office()] * 4, 8.5))
    outage = office()
    outage[OPENING - 6 : OPENING + 6] = [None] * 12
    outage[OPENING + 6 : OPENING + 12] = [60 * RATE] * 6
    assert forecast(MODEL, seen([office(), outage, office(), office()], 8.5)).plan == usual.plan
    quiet: Rates = [0.3 * RATE] * DAY
    storm: Rates = [60 * RATE if OPENING <= number < OPENING + 6 else rate for number, rate in enumerate(quiet)]
    for days in ([quiet, quiet, storm], [quiet, storm, quiet], [storm, quiet, quiet]):
        assert forecast(MODEL, seen(days, 8.5, quiet)).plan == FloorPlan()


def test_after_an_hour_without_measurements_there_are_no_bounds() -> None:
    today = office()
    today[: 9 * 12] = [None] * (9 * 12)
    assert forecast(MODEL, seen([office()] * 3, 8.5, today)).plan == FloorPlan()
    today[100] = 0.3 * RATE
    assert forecast(MODEL, seen([office()] * 3, 8.5, today)).plan.highest == wanted(5.0)


def test_half_of_the_bins_suffice() -> None:
    gaps: Rates = [rate if number % 2 else None for number, rate in enumerate(office())]
    assert forecast(MODEL, seen([office(), gaps, office()], 8.5)).plan.highest == wanted(5.0)


@pytest.mark.parametrize("hours", [-1, 1])
def test_after_daylight_saving_the_bounds_are_no_higher_than_before(hours: int) -> None:
    moved = office(opening=OPENING + 12 * hours)
    for hour in range(7, 12):
        for days in range(4):
            found = forecast(MODEL, seen([*[office()] * (4 - days), *[moved] * days], hour, moved))
            assert found.plan.highest <= wanted(5.0)
    assert forecast(MODEL, seen([office(), *[moved] * 3], 8.5 + hours, moved)).plan.highest == wanted(5.0)


def test_a_plan_ends() -> None:
    plan = FloorPlan(100, (3, 4), CALENDAR)
    assert [plan.at(300.0 * number) for number in (99, 100, 101, 102)] == [0, 3, 4, 0]
    assert (plan.at(-1e18), plan.at(1e18), FloorPlan().at(1e9)) == (0, 0, 0)


def test_the_bounds_are_at_most_max_replicas() -> None:
    small = MODEL.with_bounds(1, 3)
    assert forecast(small, seen([office()] * 3, 8.5)).plan.highest <= 3
    sized = MODEL.with_bounds(8, 16)
    assert forecast(sized, seen([office()] * 3, 8.5)).plan.highest == 0, "minReplicas suffices"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e12)), min_size=4, max_size=4),
    st.integers(0, 4 * DAY),
    st.floats(0, 1e5),
)
def test_any_record_gives_bounds_within_max_replicas(loads: Rates, known: int, start: float) -> None:
    days = [load for load in loads for _ in range(DAY)][: known + BEHIND_BINS]
    found = forecast(replace(MODEL, start_seconds=start), History(CALENDAR, MONDAY + len(days), days))
    assert all(0 <= floor <= 16 for floor in found.plan.floors)
    assert len(found.plan.floors) <= AHEAD_BINS


def rehearsal(history: History, **changes: object) -> Rehearsal:
    days = Days(history.now, encoded(history.rates), history.calendar).encode()
    hours = Days(1, encoded([0.3 * RATE])).encode()
    return replace(Rehearsal(model=MODEL, arrivals=hours, days=days), **changes)  # type: ignore[arg-type]


def test_a_rehearsal_plans_and_names_the_evidence_and_the_cost() -> None:
    learning = learn(rehearsal(seen([office()] * 3, 8.5)))
    assert learning.plan.highest == wanted(5.0)
    pattern = (
        r".*; around this time on the last such day, the present settings serve \d\d\.\d % in time for \d+\.\d "
        r"replica-hours; with what the days before required, \d\d\.\d % for \d+\.\d replica-hours; so up to "
        rf"{wanted(5.0)} replicas in the next 2 h"
    )
    assert re.fullmatch(pattern, learning.message)
    assert len(learning.message) <= 1024
    again = learn(rehearsal(seen([office()] * 3, 2.0)))
    assert (again.plan, "around" in again.message) == (FloorPlan(), False)


def test_the_work_of_a_rehearsal_of_days_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    served = 0
    serve = FleetReplay.serve

    def counting(self: FleetReplay, rate: float) -> object:
        nonlocal served
        served += 1
        return serve(self, rate)

    monkeypatch.setattr(FleetReplay, "serve", counting)
    assert forecast(MODEL, seen([office()] * 7, 8.5, begin=MONDAY - 4 * DAY)).verdict == "Clear"
    slots = (AHEAD_BINS + BEHIND_BINS) * CALENDAR.bin_seconds // SLOT_SECONDS
    assert served <= 2 * slots == 1440
    served = 0
    forecast(MODEL, seen([office()] * 3, 2.0))
    assert served <= slots, "one replay where the rules suffice"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(["Advise", "Apply"]), st.floats(0.2, 6.0))
def test_decisions_are_never_below_those_of_the_other_rules(learned: int, planned: int, mode: str, load: float) -> None:
    rules = policy(min_replicas=1, max_replicas=10)
    fleet = FluidFleet.of(2, rules, lambda time: load if time > 100 else 1.0)
    fleet.run(150)
    plain = Case(policy=rules, fleet=fleet.observed(), now=fleet.time + 1, state=fleet.state)
    case = replace(plain, learned=learned, planned=planned, policy=replace(rules, learning=mode))  # type: ignore[arg-type]
    without, _ = decide(plain)
    decision, _ = decide(case)
    if mode == "Advise":
        assert decision == without
    else:
        assert decision.replicas >= max(without.replicas, min(10, max(learned, planned)))


def test_the_higher_bound_applies_and_says_where_it_comes_from() -> None:
    rules = Policy(min_replicas=1, max_replicas=9)
    assert with_learned_floor(rules, 3, 5).learned == (
        "the load at this time on earlier days requires at least 5 replicas"
    )
    assert with_learned_floor(rules, 5, 3).learned == "the load of the last hours requires at least 5 replicas"
    assert with_learned_floor(rules, 0, 20).min_replicas == 9
    assert with_learned_floor(replace(rules, min_replicas=0), 0, 5).min_replicas == 0
