"""One decision of the autoscaler as a function of its inputs. Pure.

It combines the floor, the policy, and rate limits or a dry run. The operator decides with `decide`, and `kubectl
fastgen explain-scaling` repeats a recorded decision with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.observation import Fleet
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.dry_run import DryRun, rebased
from fastgen_operator.autoscale.rules.rate_limits import NO_LIMITS, RateLimits, Scaling, limited
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.rules.schedules import Floor, explained, with_floor

_Value = TypeVar("_Value", State, Decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a decision depends on.

    Attributes:
        now: monotonic time in seconds, as in the fleet's samples.
        floor: lower bound that a schedule sets; None if none does.
        is_dry_run: whether the decision is only shown.
        state: demand, speeds and previous decisions, before this one.
        scalings: changes of the number of replicas by earlier decisions.
        dry_run: earlier recommendations of a dry run.
    """

    policy: Policy
    fleet: Fleet
    now: float
    floor: Floor | None = None
    rate_limits: RateLimits = NO_LIMITS
    is_dry_run: bool = False
    state: State = field(default_factory=State)
    scalings: tuple[Scaling, ...] = ()
    dry_run: DryRun = field(default_factory=DryRun)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decision, and what the next one depends on."""

    decision: Decision
    state: State
    scalings: tuple[Scaling, ...]
    dry_run: DryRun


def decide(case: Case) -> Outcome:
    """Apply the schedule's floor, the policy, and either the rate limits or the dry run, in this order."""
    policy, fleet, now = with_floor(case.policy, case.floor), case.fleet, case.now
    if case.is_dry_run:
        decision, state = recommend(policy, rebased(case.state, fleet.replicas), fleet, now)
        decision = explained(decision, case.floor)
        window = state.release.window(policy.down_window)
        dry_run = case.dry_run.show(decision, fleet.replicas, window, now)
        assert dry_run.shown is not None
        return Outcome(dry_run.shown, state, case.scalings, dry_run)
    before = case.state
    decision, state = recommend(policy, before, fleet, now)
    last = before.replicas or fleet.replicas
    current = policy.within_bounds(last)
    scalings = case.rate_limits.kept(case.scalings, now)
    allowed = case.rate_limits.allowed(current, decision.replicas, scalings, now)
    decision = limited(decision, current, allowed)
    down_at = state.down_at
    if allowed == last:
        # Nothing is done, so there is no new reason, and the next step down need not wait.
        decision, down_at = _with(decision, change=before.change), before.down_at
    else:
        scalings = (*scalings, Scaling(now, allowed - last))
    decision = explained(decision, case.floor)
    state = _with(state, replicas=allowed, change=decision.change, down_at=down_at)
    return Outcome(decision, state, scalings, case.dry_run)


def _with(value: _Value, **fields: Any) -> _Value:
    """Return the value with these fields.

    It is the same object if it already has them, because copies cost more than decisions.
    """
    if all(getattr(value, name) == field for name, field in fields.items()):
        return value
    return replace(value, **fields)
