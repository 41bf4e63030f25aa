"""Decide the number of replicas. Pure.

The decision depends on the policy, the observed fleet and the state of previous decisions. `recommend` is called once
per scrape. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale.decision import Change, Decision, Hold, Limit, Sizing, counted
from fastgen_operator.autoscale.measure.averages import WindowMaximum
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import Demand
from fastgen_operator.autoscale.measure.rates import ReplicaLoad
from fastgen_operator.autoscale.observation import MISSED_SCRAPES, Fleet
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.headroom import derived_utilization
from fastgen_operator.autoscale.rules.needs import (
    Need,
    explain_missing,
    failing_replicas,
    missing_replicas,
    required_replicas,
)
from fastgen_operator.autoscale.rules.release import Release

# Within this period, scale up to at most twice the size or by four, as the HorizontalPodAutoscaler does.
UP_SECONDS: Final = 15.0
UP_FACTOR: Final = 2
UP_REPLICAS: Final = 4
# Minimum time between two scale-down steps: the slow average of the demand, and so a queue that a step causes, shows by
# then.
DOWN_SECONDS: Final = 30.0
# Reasons of scale-ups during which requests are late until the new replicas are ready.
BURSTS: Final = ("DemandJumped", "BacklogTooLong")
# Tolerance for floating-point errors: 3.0000000001 replicas are three.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """State carried from decision to decision. A new state never scales down.

    Attributes:
        since: time of the first metrics; nothing is removed until one scale-down window later.
        replicas: last decision; 0 before the first one.
        change: reason for `replicas`.
        demand: measured demand.
        speeds: capacity of each replica, and of the fleet.
        down_needs: required replicas over the scale-down window.
        up_needs: negated required replicas over the scale-up window, so that its maximum is the minimum need.
        unbounded_needs: required replicas before limits over the scale-down window, to report that a bound applies.
        up_since, up_from: start of the current scale-up period, and the replicas at its start.
        down_at: time of the last scale-down step.
        release: the learned length of the scale-down window.
    """

    since: float = math.inf
    replicas: int = 0
    change: Change | None = None
    demand: Demand = field(default_factory=lambda: Demand(replicas={}, first_seen={}))
    speeds: ReplicaSpeeds = field(default_factory=ReplicaSpeeds)
    down_needs: WindowMaximum = field(default_factory=WindowMaximum)
    up_needs: WindowMaximum = field(default_factory=WindowMaximum)
    unbounded_needs: WindowMaximum = field(default_factory=WindowMaximum)
    up_since: float = -math.inf
    up_from: int = 0
    down_at: float = -math.inf
    release: Release = field(default_factory=Release)


def measure(policy: Policy, state: State, fleet: Fleet, now: float) -> State:
    """Return the state with the demand and the speeds of the replicas at `now`; decide nothing."""
    demand = state.demand.observe(fleet, now, policy.scrape_seconds)
    speeds = state.speeds.observe(demand.replicas, fleet.revisions, demand.requests.mean, policy, now)
    return replace(state, demand=demand, speeds=speeds)


def recommend(policy: Policy, state: State, fleet: Fleet, now: float) -> tuple[Decision, State]:
    """Return the decision at `now` and the state for the next one."""
    state = _within_bounds(policy, measure(policy, state, fleet, now), fleet.replicas)
    demand, speeds = state.demand, state.speeds
    fresh = demand.fresh(fleet, now, policy.scrape_seconds)
    loaded = len(fleet.ready) - demand.num_new(fleet, now, policy.scrape_seconds)
    hold = _missing_data(fleet, fresh, loaded, policy)
    if hold is not None:
        return _held(state, hold)
    if now < state.since:
        state = replace(state, since=now)
    if not demand.is_known:
        # A single sample gives no rate.
        return _held(state, None)
    if speeds.capacity is None and (
        demand.slow.value > 0 or any(load.sample.backlog_tokens for load in fresh.values())
    ):
        return _held(state, Hold("CapacityUnknown", "the engines have not measured their speed yet"))
    policy = _with_headroom(policy, state)
    needs = required_replicas(fleet, demand, fresh, loaded, speeds, policy)
    return _decide(policy, state, fleet, needs, now)


def _with_headroom(policy: Policy, state: State) -> Policy:
    """Return the policy with the utilization that follows from what was measured, if none is configured."""
    capacity = state.speeds.capacity
    if not policy.derives_utilization or capacity is None:
        return policy
    shape = state.demand.requests.mean
    share = derived_utilization(shape, capacity.tokens_per_second, policy.first_token_seconds)
    return policy if share == policy.utilization else replace(policy, utilization=share)


def _within_bounds(policy: Policy, state: State, present: int) -> State:
    before = state.replicas or present
    allowed = policy.within_bounds(before)
    if allowed == before:
        return state if state.replicas else replace(state, replicas=present)
    message = f"{counted(before)} outside the bounds {policy.min_replicas} to {policy.max_replicas}"
    return replace(state, replicas=allowed, change=Change("BoundsChanged", message))


def _missing_data(fleet: Fleet, fresh: dict[str, ReplicaLoad], loaded: int, policy: Policy) -> Hold | None:
    """Return why the data is insufficient for a decision; None if it is sufficient."""
    ready = len(fleet.ready)
    if not ready:
        return Hold("NoReadyReplicas", "no replica is ready, so the load cannot be measured")
    if not any(name in fleet.samples for name in fleet.ready):
        return Hold("NoMetrics", "no ready replica has returned usable metrics yet")
    if not fresh or loaded - len(fresh) > loaded / 2:
        seconds = MISSED_SCRAPES * policy.scrape_seconds
        return Hold(
            "MetricsStale",
            f"more than half of {ready} ready replicas have returned no usable metrics for {seconds:g} s",
        )
    return None


def _held(state: State, hold: Hold | None) -> tuple[Decision, State]:
    return Decision(state.replicas, state.change, hold), state


def _decide(policy: Policy, state: State, fleet: Fleet, needs: list[Need], now: float) -> tuple[Decision, State]:
    missing = missing_replicas(fleet, state.speeds, state.replicas)
    up = _whole(max(need.up for need in needs) + missing)
    # Failing pods are kept only until others are ready in their place.
    down = max(need.down for need in needs) + state.speeds.deficit
    release = state.release.after_quiet(now, policy.down_window)
    state = replace(
        state,
        release=release,
        down_needs=state.down_needs.add(now, down, release.window(policy.down_window)),
        up_needs=state.up_needs.add(now, -up, policy.up_window),
        unbounded_needs=state.unbounded_needs.add(now, up, max(policy.down_window, UP_SECONDS)),
    )
    state, hold, limit = _scale(policy, state, fleet, needs, now)
    if limit is None:
        limit = _node_limit(state, fleet) or _bound_limit(policy, state)
    capacity = state.speeds.capacity
    if capacity is None:
        return Decision(state.replicas, state.change, hold, limit), state
    arriving = state.demand.slow.value
    sizing = Sizing(arriving, capacity.tokens_per_second, policy.utilization, missing, state.demand.is_warm)
    return Decision(state.replicas, state.change, hold, limit, arriving / sizing.capacity, sizing), state


def _scale(
    policy: Policy, state: State, fleet: Fleet, needs: list[Need], now: float
) -> tuple[State, Hold | None, Limit | None]:
    current = state.replicas
    up = policy.within_bounds(round(-state.up_needs.value))
    if up > current and not fleet.without_room and now - state.since >= policy.up_window:
        state = _up_period(state, now)
        most = max(UP_FACTOR * state.up_from, state.up_from + UP_REPLICAS)
        allowed = min(up, most)
        limit = None
        if allowed < up:
            limit = Limit("RateLimited", f"scaling up is limited to {most} replicas within {UP_SECONDS:g} s")
        if allowed > current:
            change = _reason(fleet, needs, state)
            release = state.release
            if change.reason in BURSTS:
                release = release.after_burst(now, policy.down_window)
            state = replace(state, replicas=allowed, change=change, release=release)
        return state, None, limit
    deficit = state.speeds.deficit
    needed = max(state.down_needs.value, *(need.floor + deficit for need in needs))
    down = policy.within_bounds(_whole(needed))
    # Pods that do not serve carry no load, so enough ready replicas must remain.
    if down >= current or policy.within_bounds(_whole(needed - deficit)) > len(fleet.ready):
        return state, None, None
    if now - state.since < policy.down_window:
        message = f"fewer replicas would suffice; the scale-down window of {policy.down_window:g} s is not over yet"
        return state, Hold("HoldAfterRestart", message), None
    if now - state.down_at < DOWN_SECONDS:
        return state, None, None
    step = max(1, math.floor(current * policy.max_step))
    fewer = max(down, current - step)
    failing = failing_replicas(fleet, current)
    if current - fewer <= failing:
        message = (
            f"{counted(len(fleet.ready))} ready and sufficient; {counted(current - fewer)} failing or lost removed"
        )
        return replace(state, replicas=fewer, down_at=now, change=Change("ReplicasReplaced", message)), None, None
    window = state.release.window(policy.down_window)
    change = Change("DemandFell", f"fewer than {current} replicas were sufficient for {window:g} s")
    release = state.release.after_scale_down(now)
    return replace(state, replicas=fewer, down_at=now, change=change, release=release), None, None


def _reason(fleet: Fleet, needs: list[Need], state: State) -> Change:
    """Return why replicas are added: a signal, or only that some of the present ones do not serve."""
    if max(need.up for need in needs) <= state.replicas:
        return explain_missing(fleet, state.speeds)
    return max(needs, key=lambda need: need.priority).change


def _up_period(state: State, now: float) -> State:
    if now - state.up_since < UP_SECONDS:
        return state
    return replace(state, up_since=now, up_from=state.replicas)


def _node_limit(state: State, fleet: Fleet) -> Limit | None:
    """Return the limit if the node has no room for replicas that the load requires.

    The replicas may run on only one node.
    """
    if not fleet.without_room or state.unbounded_needs.value <= len(fleet.ready):
        return None
    return Limit(
        "VolumeOnOneNode",
        f"the load requires more replicas than the {counted(len(fleet.ready))} ready, and {fleet.without_room} more "
        "cannot start: the node of the ReadWriteOnce volume has no room; see PodsScheduled",
    )


def _bound_limit(policy: Policy, state: State) -> Limit | None:
    """Return the bound that the load exceeded within the scale-down window: the window prevents flapping."""
    if state.unbounded_needs.value > policy.max_replicas:
        return Limit(
            "TooManyReplicas", f"the load requires more than spec.autoscaling.maxReplicas, {policy.max_replicas}"
        )
    if max(1, _whole(state.down_needs.value)) < policy.min_replicas:
        return Limit(
            "TooFewReplicas", f"the load requires fewer than spec.autoscaling.minReplicas, {policy.min_replicas}"
        )
    return None


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)
