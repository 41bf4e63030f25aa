"""Compute how many replicas each signal requires, and why: one function for each signal. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.capacity import KV_SHARE
from fastgen_operator.autoscale.decision import Change, counted
from fastgen_operator.autoscale.demand import Demand, ReplicaLoad
from fastgen_operator.autoscale.observation import Fleet
from fastgen_operator.autoscale.policy import Policy

# If the fast average requires this many times the ready replicas, scale up without waiting for the slow average.
JUMP_RATIO: Final = 2.0
# Assumed time from a pod's creation to ready until one was observed, and bounds for observed times.
DEFAULT_START_SECONDS: Final = 60.0
_START_BOUNDS: Final = (5.0, 900.0)
# Weight from which the averages cause a scale-up: a single interval after a restart is noise.
_WARM: Final = 1 - math.exp(-1.0) - 1e-9


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that one signal requires, as fractions. The decision takes the maxima over all signals, rounded up.

    Attributes:
        change: reason and message of a scale-up for this need.
        priority: the need with the highest one explains a scale-up. In replicas; infinite to come first.
        up: replicas to scale up to.
        down: replicas to keep for the scale-down window.
        floor: replicas to keep only now: added replicas would start too late to help.
    """

    change: Change
    priority: float
    up: float
    down: float = 0.0
    floor: float = 0.0


def required_replicas(
    fleet: Fleet, demand: Demand, fresh: dict[str, ReplicaLoad], loaded: int, rate: float, policy: Policy
) -> list[Need]:
    """Return the needs of a fleet. Of those with the same priority, the first explains a scale-up.

    Args:
        fresh: replicas with a fresh sample, at least one. The others are assumed to have their mean load.
        loaded: number of replicas that receive load, with or without a fresh sample.
        rate: capacity of one replica in tokens per second; infinite if unknown, which requires that there is no demand.
    """
    samples = [load.sample for load in fresh.values()]
    scale = loaded / len(samples)
    return [
        _kv_cache(fleet, sum(sample.kv_used for sample in samples) * scale),
        _demand(fleet, demand, loaded - len(samples), rate, policy),
        _jump(fleet, demand, rate, policy),
        _backlog(fleet, demand, sum(sample.backlog_tokens for sample in samples) * scale, rate, policy),
    ]


def start_seconds(fleet: Fleet) -> float:
    """Return the time in seconds that a new pod needs to become ready."""
    least, most = _START_BOUNDS
    return min(most, max(least, fleet.start_seconds or DEFAULT_START_SECONDS))


def _kv_cache(fleet: Fleet, used: float) -> Need:
    """Keep the KV cache below its target utilization; `used` is the sum over the replicas."""
    ready = len(fleet.ready)
    need = used / KV_SHARE
    message = f"the KV cache of {counted(ready)} is {100 * KV_SHARE * need / ready:.0f} % full"
    return Need(Change("KVCacheFull", message), priority=need, up=need, down=need)


def _demand(fleet: Fleet, demand: Demand, stale: int, rate: float, policy: Policy) -> Need:
    """Serve the slow average; `stale` replicas without fresh metrics count as fully utilized when scaling down."""
    ready = len(fleet.ready)
    load = demand.slow.value / rate
    need = load / policy.utilization
    message = f"the demand uses {100 * load / ready:.0f} % of {counted(ready)}; target {100 * policy.utilization:.0f} %"
    up = need if demand.slow.weight >= _WARM else 0.0
    return Need(Change("DemandGrew", message), priority=need, up=up, down=(load + stale) / policy.down_utilization)


def _jump(fleet: Fleet, demand: Demand, rate: float, policy: Policy) -> Need:
    """Serve the fast average if it exceeds the ready replicas by far."""
    ready = len(fleet.ready)
    load = demand.fast.value / rate
    need = load / policy.utilization
    message = (
        f"the demand of the last seconds requires {load:.1f} replicas at 100 % utilization; {counted(ready)} "
        f"ready, target {100 * policy.utilization:.0f} %"
    )
    jumped = need >= JUMP_RATIO * ready
    up = need if jumped and demand.slow.weight >= _WARM else 0.0
    return Need(Change("DemandJumped", message), priority=math.inf if jumped else 0.0, up=up)


def _backlog(fleet: Fleet, demand: Demand, backlog: float, rate: float, policy: Policy) -> Need:
    """Serve the demand and drain `backlog` queued prompt tokens in time."""
    work = backlog * demand.requests.work_per_prompt_token
    # Time for the ready replicas to process the backlog if nothing more arrived.
    drain_seconds = work / (rate * len(fleet.ready))
    # A backlog beyond the target proves an overload, so a higher fast average is not noise.
    late = drain_seconds > policy.first_token_seconds
    arriving = max(demand.slow.value, demand.fast.value) if late else demand.slow.value
    need = (arriving + _drain_rate(fleet, work, arriving, rate, policy)) / rate
    floor = demand.slow.value / rate + work / policy.first_token_seconds / rate
    message = (
        f"the backlog of {backlog:,.0f} tokens takes {drain_seconds:.3g} s on {counted(len(fleet.ready))}; "
        f"target {policy.first_token_seconds:g} s"
    )
    return Need(Change("BacklogTooLong", message), priority=need, up=need, down=need, floor=floor)


def _drain_rate(fleet: Fleet, work: float, arriving: float, rate: float, policy: Policy) -> float:
    """Return the tokens per second needed to drain the backlog that remains when a new pod becomes ready.

    Ready and pending pods work in the meantime: a burst that they finish by then needs no more pods. The remainder
    should drain within half the first-token target, but not faster than within another start time: pods for a shorter
    backlog are not worth starting.
    """
    start = start_seconds(fleet)
    serving = len(fleet.ready) * start + sum(min(age, start) for age in fleet.pending_ages)
    left = max(0.0, work + arriving * start - rate * serving)
    return left / max(policy.first_token_seconds / 2, start)
