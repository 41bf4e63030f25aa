"""Schedules: when they are active, in which order of time zones and bounds, and what the decision says. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from fastgen_operator.api.autoscaling import CRON_PATTERN, Autoscaling
from fastgen_operator.autoscale.decision import Change, Decision, Limit
from fastgen_operator.autoscale.rules.schedules import Floor, faults, timetable, with_floor
from fastgen_operator.autoscale.sample import Sample, StepCoefficients
from fastgen_operator.autoscale.watchlist import Record, Subject
from harness.fluid import policy
from harness.objects import pod_with

BERLIN = ZoneInfo("Europe/Berlin")
OFFICE = {
    "name": "office",
    "start": "0 8 * * mon-fri",
    "end": "0 18 * * mon-fri",
    "timeZone": "Europe/Berlin",
    "minReplicas": 5,
}


def scaling(*schedules: dict[str, Any], **more: Any) -> Autoscaling:
    return Autoscaling.model_validate({"maxReplicas": 10, "schedules": list(schedules), **more})


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=BERLIN, fold=fold)  # type: ignore[arg-type, misc]


def floor_at(autoscaling: Autoscaling, now: datetime) -> int | None:
    floor = timetable(autoscaling, now).floor
    return None if floor is None else floor.replicas


@pytest.mark.parametrize(
    ("now", "floor", "due"),
    [
        (berlin(2026, 11, 23, 7, 59, 59), None, berlin(2026, 11, 23, 8)),
        (berlin(2026, 11, 23, 8), 5, berlin(2026, 11, 23, 18)),
        (berlin(2026, 11, 23, 17, 59, 59), 5, berlin(2026, 11, 23, 18)),
        (berlin(2026, 11, 23, 18), None, berlin(2026, 11, 24, 8)),
        (berlin(2026, 11, 28, 12), None, berlin(2026, 11, 30, 8)),  # a Saturday
    ],
)
def test_a_schedule_is_active_from_its_start_until_before_its_end(
    now: datetime, floor: int | None, due: datetime
) -> None:
    for zone in (BERLIN, UTC, ZoneInfo("Asia/Tokyo")):
        found = timetable(scaling(OFFICE), now.astimezone(zone))
        assert (None if found.floor is None else found.floor.replicas) == floor
        assert found.due == due.astimezone(UTC)


def test_a_daily_end_ends_a_weekly_start_on_the_first_day() -> None:
    weekly = scaling({**OFFICE, "start": "0 8 * * mon", "end": "0 18 * * *"})
    assert floor_at(weekly, berlin(2026, 11, 23, 12)) == 5
    assert floor_at(weekly, berlin(2026, 11, 24, 12)) is None


NIGHT = {
    "name": "night",
    "start": "30 2 * * *",
    "durationSeconds": 3600,
    "timeZone": "Europe/Berlin",
    "minReplicas": 5,
}


@pytest.mark.parametrize(
    ("now", "floor"),
    [
        # Daylight saving time begins: 2:00 to 3:00 does not exist.
        (berlin(2026, 3, 29, 1, 59, 59), None),
        (berlin(2026, 3, 29, 3), 5),
        (berlin(2026, 3, 29, 3, 59, 59), 5),
        (berlin(2026, 3, 29, 4), None),
        # It ends: 2:00 to 3:00 exists twice. An hour after the first 2:30 it is 2:30 again.
        (berlin(2026, 10, 25, 2, 29, 59), None),
        (berlin(2026, 10, 25, 2, 30), 5),
        (berlin(2026, 10, 25, 2, 15, fold=1), 5),
        (berlin(2026, 10, 25, 2, 30, fold=1), None),
        (berlin(2026, 10, 25, 2, 45, fold=1), None),
    ],
)
def test_daylight_saving_time_neither_loses_nor_repeats_a_start(now: datetime, floor: int | None) -> None:
    assert floor_at(scaling(NIGHT), now) == floor


def test_every_boundary_is_due_and_nothing_changes_between_two() -> None:
    """Follow the due times through a year with both changes of daylight saving time."""
    autoscaling = scaling(OFFICE, {**NIGHT, "minReplicas": 7}, minReplicas=2)
    now, end = berlin(2026, 1, 1).astimezone(UTC), berlin(2027, 1, 1).astimezone(UTC)
    starts = {"office": 0, "night": 0}
    before: Floor | None = None
    while now < end:
        found = timetable(autoscaling, now)
        assert found.due is not None
        assert found.due > now
        if found.floor is not None and (before is None or before.schedule != found.floor.schedule):
            starts[found.floor.schedule] += 1
        before = found.floor
        assert timetable(autoscaling, found.due - timedelta(microseconds=1)).floor == found.floor
        now = found.due
    assert starts == {"office": 261, "night": 365}


def test_the_largest_active_floor_applies_and_one_that_is_not_above_min_replicas_does_not() -> None:
    lunch = {**OFFICE, "name": "lunch", "start": "0 12 * * *", "end": "0 13 * * *", "minReplicas": 8}
    both, noon = scaling(OFFICE, lunch), berlin(2026, 11, 23, 12, 30)
    floor = timetable(both, noon).floor
    assert floor is not None
    assert str(floor) == "schedule lunch requires at least 8 replicas until 2026-11-23T13:00:00+01:00"
    assert floor_at(both, berlin(2026, 11, 23, 13)) == 5
    assert floor_at(scaling(OFFICE, lunch, minReplicas=8), noon) is None
    assert timetable(scaling(OFFICE, minReplicas=9), noon).due is not None


def test_what_the_api_server_cannot_check_is_reported_with_field_and_remedy_and_the_others_apply() -> None:
    bad = {
        "start": {**OFFICE, "name": "a", "start": "0 8 * * 5-1"},
        "timeZone": {**OFFICE, "name": "b", "timeZone": "Mars/Olympus"},
        "end": {**OFFICE, "name": "c", "end": "0 0 30 2 *"},
    }
    found = faults(scaling(*bad.values(), OFFICE))
    assert len(found) == len(bad)
    for number, (field, fault) in enumerate(zip(bad, found, strict=True)):
        assert fault.startswith(f"spec.autoscaling.schedules[{number}].{field}: ")
        assert "correct it" in fault
    assert floor_at(scaling(*bad.values(), OFFICE), berlin(2026, 11, 23, 12)) == 5
    assert faults(scaling(OFFICE, NIGHT)) == faults(None) == []


@pytest.mark.parametrize(
    ("expression", "valid"),
    [
        ("0 8 * * mon-fri", True),
        ("*/5 0-23/2 1,15 JAN-mar 0", True),
        ("5/15 * * * mon,wed-fri", True),
        ("60 * * * *", False),
        ("0 24 * * *", False),
        ("0 0 0 * *", False),
        ("0 0 * 13 *", False),
        ("* * * * 8", False),
        ("*/0 * * * *", False),
        ("* * * *", False),
        ("* * * * * *", False),
        ("@daily", False),
    ],
)
def test_the_rule_of_the_crd_knows_cron_expressions(expression: str, valid: bool) -> None:
    assert bool(re.match(CRON_PATTERN, expression)) == valid
    if valid:
        assert faults(scaling({**OFFICE, "start": expression})) == []


FLOOR = Floor("office", 5, berlin(2026, 11, 23, 18))


def test_a_floor_is_a_lower_bound_within_the_upper_one() -> None:
    rules = replace(policy(), max_replicas=4)
    assert with_floor(rules, None) is rules
    assert with_floor(rules, replace(FLOOR, replicas=3)).min_replicas == 3
    assert with_floor(rules, FLOOR).min_replicas == 4
    assert with_floor(policy(min_replicas=7), FLOOR).min_replicas == 7


def test_a_schedule_with_the_bound_of_the_spec_is_not_the_reason() -> None:
    assert with_floor(policy(min_replicas=5), FLOOR).schedule == ""
    assert with_floor(policy(min_replicas=4), FLOOR).schedule == str(FLOOR)


def idle_fleet(replicas: int, floor: Floor | None) -> Subject:
    pods = tuple(pod_with(f"chat-{n}", scheduled_at=0.0, started_at=0.0, ready_since=1.0) for n in range(replicas))
    rules = policy(down_window=20.0)
    return Subject(uid="u", policy=rules, model_name="m", replicas=replicas, pods=pods, floor=floor)


class IdleFleet:
    """An idle fleet and its autoscaler; it scrapes every 5 s."""

    def __init__(self, size: int) -> None:
        self.record, self.sizes, self.now = Record("u"), [size], 0.0

    def round_of(self, floor: Floor | None) -> Decision:
        self.now += 5.0
        idle: dict[str, Sample | None] = {
            f"chat-{n}": Sample(time=self.now, token_budget=512, step_model=StepCoefficients(0.02, 0.0001, 0.0))
            for n in range(self.sizes[-1])
        }
        self.record.update(idle_fleet(self.sizes[-1], floor), idle, self.now, self.now)
        assert self.record.decision is not None
        self.sizes.append(self.record.decision.replicas)
        return self.record.decision


def test_a_floor_acts_at_once_and_after_its_end_replicas_leave_in_steps() -> None:
    fleet = IdleFleet(1)
    fleet.round_of(None)
    decision = fleet.round_of(FLOOR)
    assert decision.replicas == 5
    assert decision.change == Change("ScheduleStarted", str(FLOOR))
    for _ in range(20):
        decision = fleet.round_of(FLOOR)
    assert decision.replicas == 5
    assert decision.limit == Limit("TooFewReplicas", f"the load requires fewer: {FLOOR}")
    for _ in range(60):
        fleet.round_of(None)
    assert fleet.sizes[-1] == 1
    assert all(before - after <= 1 for before, after in pairwise(fleet.sizes)), "one at a time"


def test_the_schedule_is_the_bound_of_a_fleet_that_is_still_above_it() -> None:
    fleet = IdleFleet(8)
    fleet.round_of(FLOOR)
    decision = fleet.round_of(FLOOR)
    assert decision.replicas > FLOOR.replicas, "held by the scale-down window"
    assert decision.limit == Limit("TooFewReplicas", f"the load requires fewer: {FLOOR}")


def test_a_bound_of_the_spec_is_the_reason_although_a_schedule_is_active() -> None:
    decision = IdleFleet(policy().max_replicas + 1).round_of(FLOOR)
    assert decision.replicas == policy().max_replicas
    assert decision.change is not None
    assert decision.change.reason == "BoundsChanged"
