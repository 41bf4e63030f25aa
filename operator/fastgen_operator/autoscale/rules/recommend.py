"""Decide the number of replicas. Pure.

A decision depends on the policy, the observed fleet and the state after the previous decision. `recommend` is called
once per scrape. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale.decision import Change, Decision, Hold, Limit, Sizing, counted
from fastgen_operator.autoscale.measure.averages import WindowMaximum
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import Demand
from fastgen_operator.autoscale.measure.quiet import Quiet
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.dry_run import DryRun
from fastgen_operator.autoscale.rules.headroom import derived_utilization
from fastgen_operator.autoscale.rules.needs import (
    Need,
    explain_missing,
    failing_replicas,
    missing_replicas,
    required_replicas,
)
from fastgen_operator.autoscale.rules.rate_limits import Scaling
from fastgen_operator.autoscale.rules.scale_down_window import ScaleDownWindow
from fastgen_operator.autoscale.sample import MISSED_SCRAPES, Fleet

# Within one period, a fleet at most doubles, or grows by four replicas if that is more, as with a
# HorizontalPodAutoscaler.
UP_SECONDS: Final = 15.0
UP_FACTOR: Final = 2
UP_REPLICAS: Final = 4
# Minimum time between two scale-down steps. By then, the slow average shows whether the last step caused a queue.
DOWN_SECONDS: Final = 30.0
# Scale-ups with these reasons come too late for some requests, which wait until the new replicas are ready.
BURSTS: Final = ("DemandJumped", "BacklogTooLong")
# Tokens per second. Below this, the average of an idle fleet is only what remains of earlier load: it never becomes 0.
_LEAST_LOAD: Final = 1.0
# Tolerance for floating-point errors: 3.0000000001 replicas are three.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """What one decision leaves for the next.

    Attributes:
        since: time of the first metrics. Within one scale-up (scale-down) window after it, the load adds (removes)
            no replicas.
        replicas: last decision; 0 before the first one, and if it was to have no replica.
        is_idle: whether the last decision was to have no replica.
        change: reason for `replicas`.
        demand: measured demand.
        speeds: estimated capacity of each replica, and their median.
        down_needs: required replicas over the scale-down window.
        up_needs: negated required replicas over the scale-up window: the maximum is that of the least need.
        unbounded_needs: required replicas of `up_needs`, not negated, over the scale-down window, or over `UP_SECONDS`
            if that is longer. Shows whether the load exceeds a bound.
        up_since, up_from: start of the current scale-up period, and the replicas at its start.
        down_at: time of the last scale-down step.
        scale_down_window: the learned scale-down window.
        scalings: recent changes of `replicas`, as far as rate limits need them.
        dry_run: the latest recommendations of a dry run.
        quiet: since when the replicas have had no work, if the last one may be removed.
        unheard_since: since when the gateway cannot be asked; infinite while it can.
    """

    since: float = math.inf
    replicas: int = 0
    is_idle: bool = False
    change: Change | None = None
    demand: Demand = field(default_factory=lambda: Demand(replicas={}, first_seen={}))
    speeds: ReplicaSpeeds = field(default_factory=ReplicaSpeeds)
    down_needs: WindowMaximum = field(default_factory=WindowMaximum)
    up_needs: WindowMaximum = field(default_factory=WindowMaximum)
    unbounded_needs: WindowMaximum = field(default_factory=WindowMaximum)
    up_since: float = -math.inf
    up_from: int = 0
    down_at: float = -math.inf
    scale_down_window: ScaleDownWindow = field(default_factory=ScaleDownWindow)
    scalings: tuple[Scaling, ...] = ()
    dry_run: DryRun = field(default_factory=DryRun)
    quiet: Quiet = field(default_factory=Quiet)
    unheard_since: float = math.inf

    def last(self, fleet: Fleet) -> int:
        """Return the replicas of the last decision, those of the fleet before the first one."""
        return 0 if self.is_idle else self.replicas or fleet.replicas


def measure(policy: Policy, state: State, fleet: Fleet, now: float) -> State:
    """Update demand and speeds of the replicas without a decision."""
    demand = state.demand.observe(fleet, now, policy.scrape_seconds)
    speeds = state.speeds.observe(demand.replicas, fleet.revisions, demand.requests.mean, policy, now)
    return replace(state, demand=demand, speeds=speeds)


def recommend(policy: Policy, state: State, fleet: Fleet, now: float) -> tuple[Decision, State]:
    """Return the decision at `now` and the state for the next one."""
    state = _within_bounds(policy, measure(policy, state, fleet, now), fleet.replicas)
    demand, speeds = state.demand, state.speeds
    fresh, loaded = demand.fresh(fleet, now, policy.scrape_seconds)
    hold = _missing_data(fleet, len(fresh), loaded, policy)
    if hold is not None:
        return Decision(state.replicas, state.change, hold), state
    if now < state.since:
        state = replace(state, since=now)
    if not demand.is_known:
        # A single sample gives no rate.
        return Decision(state.replicas, state.change), state
    if speeds.capacity is not None:
        if policy.derives_utilization:
            rate, target = speeds.capacity.tokens_per_second, policy.first_token_seconds
            policy = replace(policy, utilization=derived_utilization(demand.requests.mean, rate, target))
    elif demand.slow.value >= _LEAST_LOAD or any(load.sample.backlog_tokens for load in fresh.values()):
        hold = Hold("CapacityUnknown", "the engines have not measured their speed yet")
        return Decision(state.replicas, state.change, hold), state
    needs = required_replicas(fleet, demand, fresh, loaded, speeds, policy)
    return apply_needs(policy, state, fleet, needs, now)


def _within_bounds(policy: Policy, state: State, present: int) -> State:
    before = state.replicas or present
    allowed = policy.within_bounds(before)
    if allowed == before:
        return state if state.replicas else replace(state, replicas=present)
    if policy.schedule and before < allowed:
        return replace(state, replicas=allowed, change=Change("ScheduleStarted", policy.schedule))
    if policy.learned and before < allowed:
        return replace(state, replicas=allowed, change=Change("FloorLearned", policy.learned))
    message = f"{counted(before)} outside the bounds {policy.min_replicas} to {policy.max_replicas}"
    return replace(state, replicas=allowed, change=Change("BoundsChanged", message))


def _missing_data(fleet: Fleet, fresh: int, loaded: int, policy: Policy) -> Hold | None:
    """Return a hold if there are too few metrics for a decision.

    Args:
        fresh: replicas with fresh metrics.
        loaded: replicas that receive load: the ready ones, except those too new to have metrics.
    """
    if not fleet.ready:
        return Hold("NoReadyReplicas", "no replica is ready, so the load cannot be measured")
    if not any(name in fleet.samples for name in fleet.ready):
        return Hold("NoMetrics", "no ready replica has returned usable metrics yet")
    if not fresh or loaded - fresh > loaded / 2:
        besides = ", not counting new ones," if loaded < len(fleet.ready) else ""
        silent = f"more than half of {loaded} ready replicas{besides} have" if fresh else "no ready replica has"
        usable = "no usable" if fresh else "usable"
        seconds = MISSED_SCRAPES * policy.scrape_seconds
        return Hold("MetricsStale", f"{silent} returned {usable} metrics for {seconds:g} s")
    return None


def apply_needs(policy: Policy, state: State, fleet: Fleet, needs: list[Need], now: float) -> tuple[Decision, State]:
    """Return the decision that follows from the needs of a measured fleet, and the state for the next one."""
    missing = missing_replicas(fleet, state.speeds, state.replicas)
    up = _whole(max(need.up for need in needs) + missing)
    # Failing pods do not count here: they are kept only until others are ready in their place.
    down = max(need.down for need in needs) + state.speeds.deficit
    learned = state.scale_down_window.after_quiet(now, policy.down_window)
    state = replace(
        state,
        scale_down_window=learned,
        down_needs=state.down_needs.add(now, down, learned.seconds(policy.down_window)),
        up_needs=state.up_needs.add(now, -up, policy.up_window),
        unbounded_needs=state.unbounded_needs.add(now, up, max(policy.down_window, UP_SECONDS)),
    )
    state, hold, limit = _scale(policy, state, fleet, needs, now)
    if limit is None:
        limit = _limit(policy, state, fleet)
    sizing, demand, capacity = None, state.demand, state.speeds.capacity
    if capacity is not None:
        sizing = Sizing(demand.slow.value, capacity.tokens_per_second, policy.utilization, missing, demand.slow.is_warm)
    return Decision(state.replicas, state.change, hold, limit, sizing), state


def _scale(
    policy: Policy, state: State, fleet: Fleet, needs: list[Need], now: float
) -> tuple[State, Hold | None, Limit | None]:
    current = state.replicas
    up = policy.within_bounds(round(-state.up_needs.value))
    if up > current and not fleet.without_room and now - state.since >= policy.up_window:
        if now - state.up_since >= UP_SECONDS:
            state = replace(state, up_since=now, up_from=current)
        most = max(UP_FACTOR * state.up_from, state.up_from + UP_REPLICAS)
        message = f"the load requires more than {most} replicas, the most allowed within {UP_SECONDS:g} s"
        limited = Limit("RateLimited", message)
        allowed = min(up, most)
        if allowed > current:
            change = _reason(fleet, needs, state)
            learned = state.scale_down_window
            if change.reason in BURSTS:
                learned = learned.after_burst(now, policy.down_window)
            state = replace(state, replicas=allowed, change=change, scale_down_window=learned)
        return state, None, limited if allowed < up else None
    deficit = state.speeds.deficit
    needed = max(state.down_needs.value, *(need.floor + deficit for need in needs))
    down = policy.within_bounds(_whole(needed))
    # Pods that are not ready carry no load, so enough ready replicas must remain.
    if down >= current or policy.within_bounds(_whole(needed - deficit)) > len(fleet.ready):
        return state, None, None
    if now - state.since < policy.down_window:
        message = f"fewer replicas would suffice; the scale-down window of {policy.down_window:g} s is not over yet"
        return state, Hold("HoldAfterRestart", message), None
    if now - state.down_at < DOWN_SECONDS:
        return state, None, None
    step = max(1, math.floor(current * policy.max_step))
    fewer = max(down, current - step)
    if current - fewer <= failing_replicas(fleet, current):
        removed = f"{counted(current - fewer)} failing or lost removed"
        change = Change("ReplicasReplaced", f"{counted(len(fleet.ready))} ready and sufficient; {removed}")
    else:
        window = state.scale_down_window.seconds(policy.down_window)
        change = Change("DemandFell", f"fewer than {current} replicas were sufficient for {window:g} s")
        state = replace(state, scale_down_window=state.scale_down_window.after_scale_down(now))
    return replace(state, replicas=fewer, down_at=now, change=change), None, None


def _reason(fleet: Fleet, needs: list[Need], state: State) -> Change:
    """Return why replicas are added: because of a signal, or only because some fail or are slow."""
    if max(need.up for need in needs) <= state.replicas:
        return explain_missing(fleet, state.speeds)
    return max(needs, key=lambda need: need.priority).change


def _limit(policy: Policy, state: State, fleet: Fleet) -> Limit | None:
    """Return the bound, or the full node, that overrides the load of the last scale-down window, if any."""
    if fleet.without_room and state.unbounded_needs.value > len(fleet.ready):
        message = (
            f"the load requires more replicas than the {counted(len(fleet.ready))} ready, and {fleet.without_room} "
            "more cannot start: the node of the ReadWriteOnce volume has no room; see PodsScheduled"
        )
        return Limit("VolumeOnOneNode", message)
    if state.unbounded_needs.value > policy.max_replicas:
        message = f"the load requires more than spec.autoscaling.maxReplicas, {policy.max_replicas}"
        return Limit("TooManyReplicas", message)
    if max(1, _whole(state.down_needs.value)) < policy.min_replicas:
        message = f"the load requires fewer than minReplicas, {policy.min_replicas}"
        if raised := policy.schedule or policy.learned:
            message = f"the load requires fewer: {raised}"
        return Limit("TooFewReplicas", message)
    return None


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)
