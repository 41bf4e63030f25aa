"""One decision of the autoscaler as a function of its inputs. Pure.

The operator decides with `decide`, and `kubectl fastgen explain-scaling` repeats recorded decisions with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.rate_limits import NO_LIMITS, RateLimits, Scaling, limited
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.rules.schedules import Floor, explained, with_floor
from fastgen_operator.autoscale.sample import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The inputs of a decision.

    Attributes:
        now: monotonic time in seconds, as in the fleet's samples.
        floor: lower bound that a schedule sets; None if none does.
        is_dry_run: whether the decision is only shown.
        state: state after the previous decision.
    """

    policy: Policy
    fleet: Fleet
    now: float
    floor: Floor | None = None
    rate_limits: RateLimits = NO_LIMITS
    is_dry_run: bool = False
    state: State = field(default_factory=State)


def decide(case: Case) -> tuple[Decision, State]:
    """Apply the schedule's floor, the policy, then the rate limits or the dry run.

    Return the decision and the state for the next one.
    """
    policy, fleet, now, before = with_floor(case.policy, case.floor), case.fleet, case.now, case.state
    if case.is_dry_run:
        if 0 < fleet.replicas < before.replicas:
            # Nothing carried out the last recommendation.
            before = replace(before, replicas=fleet.replicas)
        decision, state = recommend(policy, before, fleet, now)
        window = state.scale_down_window.seconds(policy.down_window)
        shown, dry_run = state.dry_run.show(explained(decision, case.floor), fleet.replicas, window, now)
        return shown, replace(state, dry_run=dry_run)
    decision, state = recommend(policy, before, fleet, now)
    last = before.replicas or fleet.replicas
    current = policy.within_bounds(last)
    scalings = case.rate_limits.kept(state.scalings, now)
    allowed = case.rate_limits.allowed(current, decision.replicas, scalings, now)
    decision = limited(decision, current, allowed)
    down_at = state.down_at
    if allowed == last:
        # Nothing changes, so the reason stays, and the next step down need not wait.
        decision, down_at = replace(decision, change=before.change), before.down_at
    else:
        scalings = (*scalings, Scaling(now, allowed - last))
    decision = explained(decision, case.floor)
    return decision, replace(state, replicas=allowed, change=decision.change, down_at=down_at, scalings=scalings)
