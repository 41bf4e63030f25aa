"""Remove the last replica of an idle fleet, and add the first one for a held request. Pure.

With spec.autoscaling.minReplicas 0, all other rules decide as if it were 1. The last replica is removed only on
evidence of idleness: missing data never removes it. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from fastgen_operator.autoscale.decision import Change, Decision, Hold, counted
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.recommend import DOWN_SECONDS, State, measure, recommend
from fastgen_operator.autoscale.sample import Fleet, Traffic

# The status shows that the gateway cannot be asked when this has lasted for this long: its pods start and end.
FAULT_SECONDS: Final = 30.0


def wanted_replicas(
    policy: Policy, state: State, fleet: Fleet, traffic: Traffic | None, now: float
) -> tuple[Decision, State]:
    """Return the decision of `recommend`, or one with no replicas if the policy allows that and the fleet is idle.

    Args:
        traffic: None while the gateway's pods have not been asked.
    """
    if policy.min_replicas:
        return recommend(policy, replace(state, is_idle=False), fleet, now)
    traffic = traffic or Traffic()
    state = replace(state, unheard_since=min(state.unheard_since, now) if traffic.fault else math.inf)
    if state.last(fleet):
        return _without_the_last(policy, state, fleet, traffic, now)
    if not traffic.held:
        state = replace(measure(policy.awake, state, fleet, now), is_idle=True)
        return Decision(0, state.change, _hold(state, traffic, now)), state
    decision, state = recommend(policy.awake, replace(state, is_idle=False), fleet, now)
    change = Change("RequestsHeld", f"the gateway holds {counted(traffic.held, 'request')}, and there is no replica")
    return replace(decision, change=change), replace(state, change=change)


def _without_the_last(
    policy: Policy, state: State, fleet: Fleet, traffic: Traffic, now: float
) -> tuple[Decision, State]:
    """Remove the last replica if engine and gateway have had no request for the policy's time."""
    decision, state = recommend(policy.awake, state, fleet, now)
    fresh, _ = state.demand.fresh(fleet, now, policy.scrape_seconds)
    state = replace(state, quiet=state.quiet.observe(fleet, fresh, now))
    # The last scrape has succeeded, and nothing has happened since.
    is_current = all(now - load.sample.time <= policy.scrape_seconds for load in fresh.values())
    is_quiet = is_current and now - state.quiet.since >= policy.idle_seconds
    # A hold does not matter: whatever the load cannot tell, a quiet replica has none.
    if decision.replicas > 1 or traffic.held or not is_quiet:
        return decision, state
    if traffic.idle_seconds is None:
        return replace(decision, hold=_hold(state, traffic, now)), state
    if traffic.idle_seconds < policy.idle_seconds or now - state.down_at < DOWN_SECONDS:
        return decision, state
    change = Change("Idle", f"no request for {policy.idle_seconds:g} s")
    zero = replace(decision, replicas=0, change=change, sizing=None)
    return zero, replace(state, change=change, down_at=now)


def _hold(state: State, traffic: Traffic, now: float) -> Hold | None:
    """Return a hold if the gateway cannot be asked, and that lasts."""
    return Hold("GatewayUnreachable", traffic.fault) if now - state.unheard_since >= FAULT_SECONDS else None
