"""Lower bounds for the next hours, from what the same time of day brought on earlier days. Pure.

A load that rises faster than replicas start is late every day, however fast the rules react. What is usual for the next
hours is known, so replicas can be ordered one start ahead. As with the load of the last hours, this must have helped:
the newest earlier day is replayed with and without the bounds that the days before it would have given.

If today's load is lower than usual, so are the bounds; if it is higher, they are not. They never lower what the other
rules require.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS
from fastgen_operator.autoscale.rehearsal.days import EARLIER_DAYS, Calendar, History
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, Outcome, replay

# Two hours: longer than the time between two rehearsals.
AHEAD_BINS: Final = 24
# One hour, with which today is compared, and which the replay contains.
BEHIND_BINS: Final = 12
# Days that must be known for a bound: what happens once does not recur.
_LEAST_DAYS: Final = 2
# The bounds must remove at least this share of the late requests.
LEAST_GAIN: Final = 0.5

Verdict = Literal["TooLittleKnown", "Sufficient", "Unclear", "Clear"]
"""What a rehearsal of the last hours, or of an earlier day, found. TooLittleKnown: no judgement. Sufficient: the
present settings serve enough requests in time. Unclear: they do not, but the bounds that the older record suggests, if
any, help too little. Clear: higher bounds serve more."""


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """Lower bounds for the replicas by bin.

    Attributes:
        begin: number of the first bin, since 1970.
        floors: the bounds; 0 where there is none.
    """

    begin: int = 0
    floors: tuple[int, ...] = ()
    calendar: Calendar = field(default_factory=Calendar)

    def at(self, time: float) -> int:
        """Return the bound at a time in seconds since 1970; 0 if there is none, or if the plan is too old."""
        index = self.calendar.bin_at(time) - self.begin
        return self.floors[index] if 0 <= index < len(self.floors) else 0

    @property
    def highest(self) -> int:
        """The highest bound; 0 if there is none."""
        return max(self.floors, default=0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the days say about the next hours.

    Attributes:
        plan: bounds for the next hours; none without clear evidence.
        present, planned: outcome of the replayed day with the present settings, and with the bounds of the days before.
    """

    verdict: Verdict = "TooLittleKnown"
    plan: FloorPlan = field(default_factory=FloorPlan)
    present: Outcome = field(default_factory=Outcome)
    planned: Outcome = field(default_factory=Outcome)


def forecast(model: FleetModel, history: History) -> Forecast:
    """Return the bounds for the next hours, with their evidence."""
    calendar, now = history.calendar, history.now
    kind = calendar.is_weekend(now)
    days = (day for day in range(1, EARLIER_DAYS + 1) if calendar.is_weekend(now - day * calendar.bins) == kind)
    begin = now - next(days, 1) * calendar.bins - BEHIND_BINS
    tested = _floors(model, history, begin, BEHIND_BINS + AHEAD_BINS, 1)
    if tested is None:
        return Forecast()
    slots = calendar.bin_seconds // SLOT_SECONDS
    rates = [history.rate(begin + index) for index in range(len(tested)) for _ in range(slots)]
    present = replay(model, rates)
    if not present.seconds:
        return Forecast()
    if present.attainment >= model.policy.attainment:
        return Forecast("Sufficient", present=present)
    if not any(tested):
        return Forecast("Unclear", present=present, planned=present)
    planned = replay(model, rates, [floor for floor in tested for _ in range(slots)])
    is_clear = planned.gain(present) >= LEAST_GAIN
    floors = _floors(model, history, now, AHEAD_BINS, _LEAST_DAYS) if is_clear else None
    if floors is None:
        return Forecast("Unclear", present=present, planned=planned)
    return Forecast("Clear", FloorPlan(now, tuple(floors), calendar), present, planned)


def _floors(model: FleetModel, history: History, begin: int, count: int, least: int) -> list[int] | None:
    """Return the bounds of `count` bins, from what is known before the first one; None without any.

    A bound serves the load of its bin, and of those in which a replica becomes ready that is ordered during it.
    """
    level = _level(history, begin, least)
    # One bin more: the mean of a bin is less than its end if the load rises.
    ahead = math.ceil(model.start_seconds / history.calendar.bin_seconds) + 1
    usual = [history.usual(number, begin, least) for number in range(begin, begin + count + min(ahead, AHEAD_BINS))]
    if level is None or all(rate is None for rate in usual):
        return None
    capacity, policy = model.tokens_per_second * model.utilization, model.policy
    wanted = [0 if rate is None else math.ceil(min(policy.max_replicas, level * rate / capacity)) for rate in usual]
    floors = [max(wanted[index : index + ahead + 1]) for index in range(count)]
    return [floor if floor > policy.min_replicas else 0 for floor in floors]


def _level(history: History, begin: int, least: int) -> float | None:
    """Return the load before a bin as a share of what is usual there, at most 1; None if it is unknown."""
    seen = usual = 0.0
    is_known = False
    for number in range(begin - BEHIND_BINS, begin):
        rate, expected = history.rate(number), history.usual(number, begin, least)
        if rate is not None and expected is not None:
            seen, usual, is_known = seen + rate, usual + expected, True
    if not is_known:
        return None
    return min(1.0, seen / usual) if usual > 0 else 1.0
