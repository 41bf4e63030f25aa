"""The decision: how many replicas, given what was asked, what is known, and what was decided before. Pure.

`recommend` is called once for every scrape. Time is a parameter, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale import decision as words
from fastgen_operator.autoscale.averages import Average, Peaks
from fastgen_operator.autoscale.capacity import Capacity, fleet_capacity
from fastgen_operator.autoscale.decision import Change, Decision, Hold, Limit
from fastgen_operator.autoscale.demand import Demand, Track
from fastgen_operator.autoscale.needs import Needs, assess
from fastgen_operator.autoscale.observation import MISSED_SCRAPES, Fleet
from fastgen_operator.autoscale.policy import Policy

# A jump of the demand to this many times what is ready is acted on without waiting for the slow average.
PANIC_RATIO: Final = 2.0
# Growth within this many seconds is at most to twice the size or by four, as with the HorizontalPodAutoscaler.
UP_SECONDS: Final = 15.0
UP_FACTOR: Final = 2
UP_REPLICAS: Final = 4
# One step down in this many seconds.
DOWN_SECONDS: Final = 60.0
# Seconds of memory of the capacity: the step model's fit moves a little with every pass.
_CAPACITY_SECONDS: Final = 60.0
# The slow average is acted on when it has seen this much of what it remembers: one look after a restart is noise.
_WARM: Final = 1 - math.exp(-1.0) - 1e-9
# Lies in the arithmetic of floats only: 3.0000000001 replicas are three.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """What the decisions of one fleet remember. A new one knows nothing and takes nothing away.

    Attributes:
        since: when the first metrics came; until a whole window after it nothing is taken away.
        replicas: decided last; 0 before the first decision.
        change: why that many.
        demand, capacity: smoothed.
        peaks: the load of the scale-down window; `lulls`: the negated need of the scale-up window.
        asked: the need of the last scale-down window before any limit, for saying that a bound still limits.
        up_since, up_from: when the running period of scale-up began, and at how many replicas.
        down_at: when the last step down was made.
    """

    since: float = math.inf
    replicas: int = 0
    change: Change | None = None
    demand: Demand = field(default_factory=lambda: Demand(tracks={}, first_seen={}))
    capacity: Average = field(default_factory=lambda: Average(_CAPACITY_SECONDS))
    source: Capacity | None = None
    peaks: Peaks = field(default_factory=Peaks)
    lulls: Peaks = field(default_factory=Peaks)
    asked: Peaks = field(default_factory=Peaks)
    up_since: float = -math.inf
    up_from: int = 0
    down_at: float = -math.inf


def recommend(policy: Policy, state: State, fleet: Fleet, now: float) -> tuple[Decision, State]:
    """The decision for now, and what to remember of it."""
    state = _within_bounds(policy, replace(state, replicas=state.replicas or fleet.wanted))
    demand = state.demand.observe(fleet, now, policy.scrape_seconds)
    fresh = demand.fresh(fleet, now, policy.scrape_seconds)
    state = replace(state, demand=demand)
    newcomers = demand.newcomers(fleet, now, policy.scrape_seconds)
    bearing = len(fleet.ready) - newcomers
    hold = _missing(fleet, fresh, bearing, policy)
    if hold is not None:
        return _held(state, hold)
    state = replace(state, since=min(state.since, now))
    state = _learn_capacity(state, fresh, policy, now)
    if not demand.is_known:
        # One look gives no rate.
        return _held(state, None)
    needs = assess(fleet, demand, fresh, bearing, state.source, policy)
    if state.source is None and (demand.slow.value > 0 or needs.backlog_tokens > 0):
        return _held(state, Hold(words.CAPACITY_UNKNOWN, "the engines have not yet told how fast they are"))
    return _decide(policy, state, fleet, needs, bearing - len(fresh), now)


def _within_bounds(policy: Policy, state: State) -> State:
    allowed = policy.within_bounds(state.replicas)
    if allowed == state.replicas:
        return state
    message = f"{state.replicas} replicas were outside of {policy.min_replicas} to {policy.max_replicas}"
    return replace(state, replicas=allowed, change=Change(words.BOUNDS_CHANGED, message))


def _missing(fleet: Fleet, fresh: dict[str, Track], bearing: int, policy: Policy) -> Hold | None:
    """Why too little is known to decide anything; None where enough is."""
    ready = len(fleet.ready)
    if not ready:
        return Hold(words.NO_READY_REPLICAS, "no replica is ready, so there is no load to go by")
    if not any(name in fleet.samples for name in fleet.ready):
        return Hold(words.NO_METRICS, "no ready replica has given usable metrics yet")
    if not fresh or bearing - len(fresh) > bearing / 2:
        seconds = MISSED_SCRAPES * policy.scrape_seconds
        return Hold(
            words.METRICS_STALE,
            f"more than half of {ready} ready replicas have given no usable metrics for {seconds:g} s",
        )
    return None


def _learn_capacity(state: State, fresh: dict[str, Track], policy: Policy, now: float) -> State:
    demand = state.demand
    found = fleet_capacity(
        (track.sample for track in fresh.values()),
        demand.shape.mean,
        demand.observed(now),
        policy.inter_token_seconds,
        policy.max_sequences,
    )
    if found is None:
        return state
    average = state.capacity.add(found.tokens_per_second, policy.scrape_seconds)
    return replace(state, capacity=average, source=replace(found, tokens_per_second=average.value))


def _held(state: State, hold: Hold | None) -> tuple[Decision, State]:
    return Decision(state.replicas, state.change, hold, capacity=state.source), state


def _decide(
    policy: Policy, state: State, fleet: Fleet, needs: Needs, silent: int, now: float
) -> tuple[Decision, State]:
    """`silent`: ready replicas that say nothing; there is no telling that they are not full."""
    panic = needs.jump / policy.utilization >= PANIC_RATIO * len(fleet.ready)
    load = max(needs.load, needs.jump) if panic else needs.load
    by_load = load / policy.utilization if state.demand.slow.weight >= _WARM else 0.0
    up = _whole(max(by_load, needs.queue, needs.kv))
    filled = needs.load + silent
    down_now = max(filled / policy.down_utilization, needs.queue, needs.kv)
    state = replace(
        state,
        peaks=state.peaks.add(now, down_now, policy.down_window),
        lulls=state.lulls.add(now, -up, policy.up_window),
        asked=state.asked.add(now, up, max(policy.down_window, UP_SECONDS)),
    )
    state, hold, limit = _grow_or_shrink(policy, state, fleet, needs, panic, now)
    if limit is None:
        limit = _bound_limit(policy, state)
    return Decision(state.replicas, state.change, hold, limit, state.source, needs.load), state


def _grow_or_shrink(
    policy: Policy, state: State, fleet: Fleet, needs: Needs, panic: bool, now: float
) -> tuple[State, Hold | None, Limit | None]:
    current = state.replicas
    up = policy.within_bounds(round(-state.lulls.largest))
    if up > current and now - state.since >= policy.up_window:
        state = _up_period(state, now)
        most = max(UP_FACTOR * state.up_from, state.up_from + UP_REPLICAS)
        allowed = min(up, most)
        limit = None
        if allowed < up:
            limit = Limit(words.RATE_LIMITED, f"growth is limited to {most} replicas within {UP_SECONDS:g} s")
        if allowed > current:
            state = replace(state, replicas=allowed, change=_growth(policy, fleet, needs, panic))
        return state, None, limit
    down = policy.within_bounds(_whole(max(state.peaks.largest, needs.stay)))
    # Pods that are not ready yet hold nothing: what stays must be ready now.
    if down >= current or down > len(fleet.ready):
        return state, None, None
    if now - state.since < policy.down_window:
        message = f"fewer would do now; nothing is taken away before the load was watched for {policy.down_window:g} s"
        return state, Hold(words.HOLD_AFTER_RESTART, message), None
    if now - state.down_at < DOWN_SECONDS:
        return state, None, None
    step = max(1, math.floor(current * policy.max_step))
    fewer = max(down, current - step)
    return replace(state, replicas=fewer, down_at=now, change=_decline(policy, current)), None, None


def _up_period(state: State, now: float) -> State:
    if now - state.up_since < UP_SECONDS:
        return state
    return replace(state, up_since=now, up_from=state.replicas)


def _bound_limit(policy: Policy, state: State) -> Limit | None:
    """A bound that the load of the last window would go beyond, so that it does not come and go with every scrape."""
    if state.asked.largest > policy.max_replicas:
        return Limit(
            words.TOO_MANY_REPLICAS,
            f"the load asks for more than spec.autoscaling.maxReplicas, {policy.max_replicas}",
        )
    if max(1, _whole(state.peaks.largest)) < policy.min_replicas:
        return Limit(
            words.TOO_FEW_REPLICAS,
            f"the load asks for fewer than spec.autoscaling.minReplicas, {policy.min_replicas}",
        )
    return None


def _growth(policy: Policy, fleet: Fleet, needs: Needs, panic: bool) -> Change:
    ready = len(fleet.ready)
    replicas = f"{ready} replica" if ready == 1 else f"{ready} replicas"
    if panic:
        return Change(
            words.DEMAND_JUMPED,
            f"the demand of the last seconds would keep {needs.jump:.1f} replicas busy; {replicas} serve",
        )
    by_load = needs.load / policy.utilization
    if needs.kv >= max(by_load, needs.queue):
        return Change(words.KV_CACHE_FULL, f"the KV cache of {replicas} is {80 * needs.kv / ready:.0f} % full")
    if needs.queue > by_load:
        target = f"target {policy.first_token_seconds:g} s"
        return Change(
            words.BACKLOG_TOO_LONG,
            f"backlog {needs.backlog_tokens:,.0f} tokens would take {needs.drain_seconds:.3g} s on {replicas}; "
            f"{target}",
        )
    percent = 100 * needs.load / ready
    return Change(
        words.DEMAND_GREW,
        f"the demand takes {percent:.0f} % of {replicas}; target {100 * policy.utilization:.0f} %",
    )


def _decline(policy: Policy, current: int) -> Change:
    return Change(
        words.DEMAND_FELL,
        f"fewer than {current} replicas have been enough for {policy.down_window:g} s",
    )


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)
