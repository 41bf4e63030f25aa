"""Which schedule sets the lower bound of the replicas, and when that changes next. Pure.

cronsim evaluates cron expressions in the schedule's time zone. As with Debian's cron, unless the minute or the hour
starts with `*`, a time that daylight saving skips fires at the end of the gap, and a repeated time fires once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from fastgen_operator.api.autoscaling import Autoscaling, Schedule
from fastgen_operator.autoscale.decision import counted
from fastgen_operator.autoscale.policy import Policy

# More than any daylight-saving change: near one, cronsim would start from an ambiguous local time.
_SHIFT: Final = timedelta(hours=3)
# An expression without a match from here on has none at all.
_SOME_TIME: Final = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Floor:
    """The lower bound that an active schedule sets.

    Attributes:
        schedule: name of the schedule.
        replicas: minReplicas of the schedule.
        until: when the schedule ends, in its time zone; None if it never does.
    """

    schedule: str
    replicas: int
    until: datetime | None

    @classmethod
    def from_status(cls, shown: dict[str, Any]) -> Floor:
        """Return the floor of a `status.autoscaling.activeSchedule`."""
        until = shown.get("until")
        return cls(shown["name"], shown["minReplicas"], None if until is None else datetime.fromisoformat(until))

    def to_status(self) -> dict[str, Any]:
        """Return `status.autoscaling.activeSchedule`."""
        shown: dict[str, Any] = {"name": self.schedule, "minReplicas": self.replicas}
        return shown if self.until is None else {**shown, "until": self.until.isoformat(timespec="seconds")}

    def __str__(self) -> str:
        end = "" if self.until is None else f" until {self.until.isoformat(timespec='seconds')}"
        return f"schedule {self.schedule} requires at least {counted(self.replicas)}{end}"


@dataclass(frozen=True, slots=True)
class Timetable:
    """The effect of the schedules at one moment.

    Attributes:
        floor: the largest lower bound of the active schedules; None if it is not above minReplicas.
        due: when a schedule starts or ends next; None if none does.
    """

    floor: Floor | None = None
    due: datetime | None = None


def timetable(autoscaling: Autoscaling | None, now: datetime) -> Timetable:
    """Return the floor at `now`, which has a time zone, and when a schedule starts or ends next.

    Invalid schedules are skipped.
    """
    if autoscaling is None:
        return Timetable()
    now = now.astimezone(UTC)
    floors: list[Floor] = []
    due: list[datetime] = []
    for schedule in autoscaling.schedules:
        if fault_of(schedule) is not None:
            continue
        zone = ZoneInfo(schedule.time_zone)
        began = _last(schedule.start, zone, now)
        until = None if began is None else _end(schedule, zone, began)
        is_active = began is not None and (until is None or until > now)
        if is_active and schedule.min_replicas > autoscaling.min_replicas:
            floors.append(Floor(schedule.name, schedule.min_replicas, until and until.astimezone(zone)))
        times = (until, _next(schedule.start, zone, now))
        due += [time for time in times if time is not None and time > now]
    highest = max(
        floors,
        key=lambda floor: (floor.replicas, floor.until.timestamp() if floor.until else math.inf),
        default=None,
    )
    return Timetable(highest, min(due, default=None))


def faults(autoscaling: Autoscaling | None) -> list[str]:
    """Return errors in schedules that the API server accepts, each with field and remedy."""
    return [
        f"spec.autoscaling.schedules[{number}].{fault}: correct it; schedule {schedule.name} is ignored until then"
        for number, schedule in enumerate(() if autoscaling is None else autoscaling.schedules)
        if (fault := fault_of(schedule)) is not None
    ]


@lru_cache(maxsize=1024)
def fault_of(schedule: Schedule) -> str | None:
    """Return the first invalid field and what is wrong with it; None if the schedule is valid."""
    if (schedule.end is None) == (schedule.duration_seconds is None):
        return "end and durationSeconds: exactly one of them is required"
    try:
        ZoneInfo(schedule.time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return f"timeZone: {schedule.time_zone!r} is not in the IANA time zone database"
    for name, expression in (("start", schedule.start), ("end", schedule.end)):
        try:
            if expression is not None and next(CronSim(expression, _SOME_TIME), None) is None:
                return f"{name}: {expression!r} matches no date"
        except CronSimError as error:
            return f"{name}: {expression!r} is not a valid cron expression, or matches no date: {error}"
    return None


def with_floor(policy: Policy, floor: Floor | None) -> Policy:
    """Return the policy with minReplicas raised to the floor, up to maxReplicas."""
    if floor is None or floor.replicas <= policy.min_replicas:
        return policy
    return policy.raised(min(policy.max_replicas, floor.replicas), schedule=str(floor))


def _end(schedule: Schedule, zone: ZoneInfo, began: datetime) -> datetime | None:
    """Return the end of the run that began at `began`; None if it never ends."""
    if schedule.end is not None:
        return _next(schedule.end, zone, began)
    assert schedule.duration_seconds is not None
    return began + timedelta(seconds=schedule.duration_seconds)


def _last(expression: str, zone: ZoneInfo, now: datetime) -> datetime | None:
    """Return the last match at or before `now`; None if there is none."""
    return next((time for time in _matches(expression, zone, now + _SHIFT, reverse=True) if time <= now), None)


def _next(expression: str, zone: ZoneInfo, now: datetime) -> datetime | None:
    """Return the first match after `now`; None if there is none."""
    return next((time for time in _matches(expression, zone, now - _SHIFT, reverse=False) if time > now), None)


def _matches(expression: str, zone: ZoneInfo, start: datetime, *, reverse: bool) -> Iterator[datetime]:
    """Yield the matches from `start` on, in UTC: Python compares times of one zone without offsets."""
    for time in CronSim(expression, start.astimezone(zone), reverse=reverse):
        yield time.astimezone(UTC)
