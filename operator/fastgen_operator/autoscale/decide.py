"""One decision of the autoscaler as a function of its inputs. Pure.

The operator decides with `decide`, and `kubectl fastgen explain-scaling` repeats recorded decisions with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.learning import with_learned_floor
from fastgen_operator.autoscale.rules.rate_limits import NO_LIMITS, RateLimits, Scaling, limited
from fastgen_operator.autoscale.rules.recommend import State
from fastgen_operator.autoscale.rules.scale_to_zero import wanted_replicas
from fastgen_operator.autoscale.rules.schedules import Floor, with_floor
from fastgen_operator.autoscale.sample import Fleet, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The inputs of a decision.

    Attributes:
        now: monotonic time in seconds, as in the fleet's samples.
        floor: lower bound that a schedule sets; None if none does.
        learned: lower bound that was learned from the last hours; 0 if none was.
        planned: lower bound that was learned from this time on earlier days; 0 if none was.
        is_dry_run: whether the decision is only shown.
        traffic: what the gateway's pods say; None if they were not asked.
        state: state after the previous decision.
    """

    policy: Policy
    fleet: Fleet
    now: float
    floor: Floor | None = None
    learned: int = 0
    planned: int = 0
    rate_limits: RateLimits = NO_LIMITS
    is_dry_run: bool = False
    traffic: Traffic | None = None
    state: State = field(default_factory=State)

    @property
    def bounded_policy(self) -> Policy:
        """The policy with the lower bounds of a schedule and, if applied, of the past."""
        policy = with_floor(self.policy, self.floor)
        return with_learned_floor(policy, self.learned, self.planned) if policy.learning == "Apply" else policy


def decide(case: Case) -> tuple[Decision, State]:
    """Apply the lower bounds of schedules and of the past, the policy, then the rate limits or the dry run.

    Return the decision and the state for the next one.
    """
    policy, fleet, now, before = case.bounded_policy, case.fleet, case.now, case.state
    if case.is_dry_run:
        before = _as_not_carried_out(policy, before, fleet)
        decision, state = wanted_replicas(policy, before, fleet, case.traffic, now)
        state = replace(state, replicas=decision.replicas, is_idle=not decision.replicas)
        window = state.scale_down_window.seconds(policy.down_window)
        shown, dry_run = state.dry_run.show(decision, fleet.replicas, window, now)
        return shown, replace(state, dry_run=dry_run)
    decision, state = wanted_replicas(policy, before, fleet, case.traffic, now)
    last = before.last(fleet)
    # Starting the first replica is not limited: a bound of 1 applies while requests are held.
    current = policy.awake.within_bounds(last)
    scalings = case.rate_limits.kept(state.scalings, now)
    allowed = last
    if decision.replicas != last:
        allowed = case.rate_limits.allowed(current, decision.replicas, scalings, now)
        decision = limited(decision, current, allowed)
    down_at = state.down_at
    if allowed == last:
        # Nothing changes, so the reason stays, and the next step down need not wait.
        decision, down_at = replace(decision, change=before.change), before.down_at
    else:
        scalings = (*scalings, Scaling(now, allowed - last))
    after = replace(state, replicas=allowed, is_idle=not allowed, change=decision.change)
    return decision, replace(after, down_at=down_at, scalings=scalings)


def _as_not_carried_out(policy: Policy, before: State, fleet: Fleet) -> State:
    """Return the state of a dry run for a fleet that may have another size than was recommended."""
    if fleet.replicas and before.is_idle:
        return replace(before, replicas=fleet.replicas, is_idle=False, down_at=-math.inf)
    if fleet.replicas < before.replicas and (fleet.replicas or not policy.min_replicas):
        return replace(before, replicas=fleet.replicas, is_idle=not fleet.replicas)
    return before
