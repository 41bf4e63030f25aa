"""Compute how many replicas the load requires, by arrival rate, backlog and KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.capacity import KV_SHARE, Capacity
from fastgen_operator.autoscale.demand import Demand, ReplicaLoad
from fastgen_operator.autoscale.observation import Fleet
from fastgen_operator.autoscale.policy import Policy

# Assumed time from a pod's creation to ready until one was observed, and bounds for observed times.
DEFAULT_START_SECONDS: Final = 60.0
_START_BOUNDS: Final = (5.0, 900.0)


@dataclass(frozen=True, slots=True)
class Needs:
    """Required replicas, as fractions; the decision rounds them up.

    Attributes:
        load: demand in fully utilized replicas, from the slow average; `fast_load`: from the fast average.
        queue: replicas to serve the demand and drain the backlog in time; at least `load`.
        floor: replicas to drain the current backlog within the first-token target. It only prevents a scale-down:
            added replicas would start too late to help.
        kv: replicas to keep the KV cache below its target utilization.
        backlog_tokens: queued prompt tokens in the whole fleet.
        drain_seconds: time for the ready replicas to process them if nothing more arrived.
    """

    load: float
    fast_load: float
    queue: float
    floor: float
    kv: float
    backlog_tokens: float
    drain_seconds: float


def required_replicas(
    fleet: Fleet, demand: Demand, fresh: dict[str, ReplicaLoad], loaded: int, capacity: Capacity | None, policy: Policy
) -> Needs:
    """Return the replicas that a fleet needs.

    Args:
        fresh: replicas with a fresh sample, at least one. The others are assumed to have their mean load.
        loaded: number of replicas that receive load, with or without a fresh sample.
        capacity: capacity of one replica; None only if there is no demand.
    """
    samples = [load.sample for load in fresh.values()]
    scale = loaded / len(samples)
    kv = sum(sample.kv_used for sample in samples) * scale / KV_SHARE
    backlog = sum(sample.backlog_tokens for sample in samples) * scale
    if capacity is None:
        return Needs(0.0, 0.0, 0.0, 0.0, kv, backlog, 0.0)
    rate = capacity.tokens_per_second
    work = backlog * demand.requests.work_per_prompt_token
    load = demand.slow.value / rate
    drain_seconds = work / (rate * len(fleet.ready))
    # A backlog beyond the target proves an overload, so a higher fast average is not noise.
    late = drain_seconds > policy.first_token_seconds
    arriving = max(demand.slow.value, demand.fast.value) if late else demand.slow.value
    return Needs(
        load=load,
        fast_load=demand.fast.value / rate,
        queue=(arriving + _drain_rate(fleet, work, arriving, rate, policy)) / rate,
        floor=load + work / policy.first_token_seconds / rate,
        kv=kv,
        backlog_tokens=backlog,
        drain_seconds=drain_seconds,
    )


def start_seconds(fleet: Fleet) -> float:
    """Return the time in seconds that a new pod needs to become ready."""
    least, most = _START_BOUNDS
    return min(most, max(least, fleet.start_seconds or DEFAULT_START_SECONDS))


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
