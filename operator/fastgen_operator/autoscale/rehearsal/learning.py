"""Learn a lower bound for the replicas from rehearsals. Pure.

Bursts that are over before a new replica is ready cannot be served by reacting to them. A higher lower bound can serve
them, and the past shows how high: the cheapest one is chosen on the older half of the recorded arrivals, and judged on
the newer half. Without clear evidence there is no bound, and it changes slowly. It never lowers what the other rules
require.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fastgen_operator.autoscale.decision import counted
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, Arrivals
from fastgen_operator.autoscale.rehearsal.days import Calendar, Days, History
from fastgen_operator.autoscale.rehearsal.forecast import LEAST_GAIN, FloorPlan, Forecast, Verdict, forecast
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, Outcome, replay

# Known arrivals from which on something is learned.
LEAST_KNOWN_SECONDS: Final = 7200.0
# In each half, requests must have been late this many times: what happens once does not recur.
_LEAST_BURSTS: Final = 2
# The bound is lowered by one replica after this many rehearsals in a row that required less.
LOWER_AFTER: Final = 3
# If no bound reaches the target, one whose attainment is this close to the best is good enough.
_NEAR_BEST: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The inputs of a rehearsal.

    Attributes:
        model: the fleet with the present policy, without a learned bound.
        arrivals: recorded arrivals, encoded.
        days: those of the last days, encoded; empty if there are none.
        calendar: of `days`.
        before: the bound that was learned until now; 0 if none.
        lower: how many of the last rehearsals in a row required a lower bound.
    """

    model: FleetModel
    arrivals: str
    days: str = ""
    calendar: Calendar = field(default_factory=Calendar)
    before: int = 0
    lower: int = 0

    @property
    def rates(self) -> list[float | None]:
        """The arriving forward tokens per second by slot, the newest last; None where unknown."""
        return Arrivals.decode(self.arrivals).rates()

    @property
    def history(self) -> History:
        """The rates of the last days."""
        return Days.decode(self.days, self.calendar).history() if self.days else Days().history()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The result of a rehearsal.

    Attributes:
        floor: learned lower bound for the replicas; 0 if the past requires none.
        lower: how many of the last rehearsals in a row required a lower bound.
        message: the evidence and the cost, in words.
        arrivals: the recorded arrivals that it follows from, encoded.
        verdict: what the rehearsal found.
        days: those of the last days, encoded; empty if there are none.
        plan: bounds for the next hours, from earlier days. A new leader makes its own.
    """

    floor: int = 0
    lower: int = 0
    message: str = ""
    arrivals: str = ""
    verdict: Verdict = "TooLittleKnown"
    days: str = ""
    plan: FloorPlan = field(default_factory=FloorPlan)

    @classmethod
    def from_status(cls, shown: Mapping[str, Any]) -> Learning:
        """Return the learning of a `status.autoscaling.learning`."""
        return cls(
            floor=shown.get("minReplicas", 0),
            message=shown["message"],
            arrivals=shown["arrivals"],
            days=shown.get("days", ""),
        )

    def to_status(self) -> dict[str, Any]:
        """Return `status.autoscaling.learning`."""
        shown = {"message": self.message, "arrivals": self.arrivals} | ({"days": self.days} if self.days else {})
        return {"minReplicas": self.floor, **shown} if self.floor else shown


def learn(rehearsal: Rehearsal) -> Learning:
    """Rehearse the recorded arrivals, and return the next bounds with their evidence."""
    hours, found = _learn_hours(rehearsal), forecast(rehearsal.model, rehearsal.history)
    message = "; ".join([hours.message, *_words_of_days(found)])
    return replace(hours, message=message, days=rehearsal.days, plan=found.plan)


def _learn_hours(rehearsal: Rehearsal) -> Learning:
    """Return the next bound that the load of the last hours requires."""
    rates, policy = rehearsal.rates, rehearsal.model.policy
    # The user may have changed the bounds since.
    before = _above_least(policy, rehearsal.before)
    known = [slot for slot, rate in enumerate(rates) if rate is not None]
    seconds = SLOT_SECONDS * len(known)
    if seconds < LEAST_KNOWN_SECONDS:
        words = f"the arrivals of {seconds / 3600:.1f} h are known; {LEAST_KNOWN_SECONDS / 3600:g} h are needed"
        kept = f"at least {counted(before)} as before: " if before else ""
        return Learning(floor=before, message=kept + words, arrivals=rehearsal.arrivals)
    middle = known[len(known) // 2]
    found = _choose(rehearsal, rates[:middle], rates[middle:])
    current, wanted = policy.within_bounds(before), policy.within_bounds(found.floor)
    lower = rehearsal.lower + 1 if wanted < current else 0
    floor = _above_least(policy, _next(current, wanted, lower))
    return Learning(
        floor=floor,
        lower=lower % LOWER_AFTER,
        message=_words(rehearsal, found, floor),
        arrivals=rehearsal.arrivals,
        verdict=found.verdict,
    )


def with_learned_floor(policy: Policy, floor: int, planned: int = 0) -> Policy:
    """Return the policy with minReplicas raised to the learned bound, up to maxReplicas.

    A fleet that may have no replica keeps its bound: its arrivals are unknown while it has none.

    Args:
        floor: what the load of the last hours requires; 0 if nothing.
        planned: what the load at this time on earlier days requires; 0 if nothing.
    """
    if not policy.min_replicas or max(floor, planned) <= policy.min_replicas:
        return policy
    raised = min(policy.max_replicas, max(floor, planned))
    when = "of the last hours" if floor >= planned else "at this time on earlier days"
    return policy.raised(raised, learned=f"the load {when} requires at least {counted(raised)}")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the two halves of the arrivals say.

    Attributes:
        floor: the bound that they require; 0 if none.
        present: outcome of the newer half with the present settings.
        judged: outcome of the newer half with the bound that the older half suggested; None if it suggested none.
        chosen: that bound.
    """

    verdict: Verdict
    present: Outcome
    judged: Outcome | None = None
    chosen: int = 0

    @property
    def floor(self) -> int:
        return self.chosen if self.verdict == "Clear" else 0


def _choose(rehearsal: Rehearsal, older: Sequence[float | None], newer: Sequence[float | None]) -> _Found:
    present = _with(rehearsal, 0, newer)
    if present.attainment >= rehearsal.model.policy.attainment:
        return _Found("Sufficient", present)
    chosen = _cheapest(rehearsal, older)
    if not chosen:
        return _Found("Unclear", present)
    judged = _with(rehearsal, chosen, newer)
    is_clear = present.bursts >= _LEAST_BURSTS and judged.gain(present) >= LEAST_GAIN
    return _Found("Clear" if is_clear else "Unclear", present, judged, chosen)


def _cheapest(rehearsal: Rehearsal, rates: Sequence[float | None]) -> int:
    """Return the lowest bound with the wanted attainment; 0 if the present one has it, or if bursts do not recur.

    A higher bound costs more and serves no less, so it is found by bisection. If none has the wanted attainment, it is
    the lowest one that is as good as the highest.
    """
    policy = rehearsal.model.policy
    wanted = policy.attainment
    present = _with(rehearsal, 0, rates)
    if present.attainment >= wanted or present.bursts < _LEAST_BURSTS:
        return 0
    highest = max((rate for rate in rates if rate is not None), default=0.0)
    needed = math.ceil(highest / (rehearsal.model.tokens_per_second * rehearsal.model.utilization)) + 1
    low, high = policy.min_replicas, policy.within_bounds(needed)
    wanted = min(wanted, _with(rehearsal, high, rates).attainment - _NEAR_BEST)
    while high - low > 1:
        middle = (low + high) // 2
        if _with(rehearsal, middle, rates).attainment >= wanted:
            high = middle
        else:
            low = middle
    return high


def _with(rehearsal: Rehearsal, floor: int, rates: Sequence[float | None]) -> Outcome:
    """Return the outcome of these arrivals with a lower bound, or with the present one if that is higher."""
    policy = rehearsal.model.policy
    return replay(rehearsal.model.with_bounds(policy.within_bounds(floor), policy.max_replicas), rates)


def _above_least(policy: Policy, floor: int) -> int:
    """Return the bound, at most maxReplicas; 0 if minReplicas suffices."""
    within = policy.within_bounds(floor)
    return within if within > policy.min_replicas else 0


def _next(before: int, wanted: int, lower: int) -> int:
    """Return the next bound: up by at most a half, or one replica; down by one, after some time."""
    if wanted > before:
        return min(wanted, before + max(1, before // 2))
    return before - 1 if lower >= LOWER_AFTER else before


def _words(rehearsal: Rehearsal, found: _Found, floor: int) -> str:
    present, judged = found.present, found.judged
    words = [
        f"in the last {present.seconds / 3600:.1f} h, the present settings serve {_share(present)} of the requests in "
        f"time for {_cost(present)}; the target is {100 * rehearsal.model.policy.attainment:.0f} %"
    ]
    if found.verdict != "Sufficient":
        words.append(
            f"requests are late in {counted(present.bursts, 'burst')}, because a replica takes "
            f"{rehearsal.model.start_seconds:.0f} s to start"
        )
        if judged is None:
            words.append("the hours before had no recurring bursts of this kind")
        else:
            would = f"at least {counted(found.chosen)} would serve {_share(judged)} for {_cost(judged)}"
            words.append(would if found.verdict == "Clear" else f"{would}, which is too small an improvement")
    return (f"at least {counted(floor)}: " if floor else "") + "; ".join(words)


def _words_of_days(found: Forecast) -> list[str]:
    """Return the evidence of the days in words; nothing if there is none, or if they require nothing."""
    present, planned, plan = found.present, found.planned, found.plan
    if planned.in_time <= present.in_time:
        return []
    ahead = plan.calendar.bin_seconds * len(plan.floors) / 3600
    words = (
        f"around this time on the last such day, the present settings serve {_share(present)} in time for "
        f"{_cost(present)}; with what the days before required, {_share(planned)} for {_cost(planned)}"
    )
    if found.verdict == "Unclear":
        return [f"{words}, which is too small an improvement"]
    bound = f"up to {counted(plan.highest)}" if plan.highest else "no more"
    return [f"{words}; so {bound} in the next {ahead:g} h"]


def _share(outcome: Outcome) -> str:
    return f"{100 * outcome.attainment:.1f} %"


def _cost(outcome: Outcome) -> str:
    return f"{outcome.replica_seconds / 3600:.1f} replica-hours"
