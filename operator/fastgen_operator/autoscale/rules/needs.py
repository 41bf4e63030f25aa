"""How many replicas each signal requires, and why: one function for each signal. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.decision import Change, counted
from fastgen_operator.autoscale.measure.capacity import KV_SHARE, ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import Demand
from fastgen_operator.autoscale.measure.rates import ReplicaLoad
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.sample import Fleet

# Scale up without waiting for the slow average if the fast one requires this many times the ready replicas.
JUMP_RATIO: Final = 2.0
# Assumed start time of a pod before one was observed, and the minimum after that.
_DEFAULT_START_SECONDS: Final = 60.0
_LEAST_START_SECONDS: Final = 5.0
# Failing and lost pods are replaced up to this share of the ready ones, rounded up. If more fail, the cause is not a
# node or a GPU, and further pods would fail too.
_REPLACED_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that one signal requires, not rounded. The largest need applies.

    Attributes:
        change: reason and message of a scale-up for this need.
        priority: the need with the highest priority explains a scale-up. In replicas; infinite to come first.
        up: replicas to scale up to.
        down: replicas to keep for the scale-down window.
        floor: replicas to keep now. The scale-down window does not remember them.
    """

    change: Change
    priority: float
    up: float
    down: float = 0.0
    floor: float = 0.0


def required_replicas(
    fleet: Fleet,
    demand: Demand,
    fresh: Mapping[str, ReplicaLoad],
    loaded: int,
    speeds: ReplicaSpeeds,
    policy: Policy,
) -> list[Need]:
    """Return the needs of a fleet, in replicas of usual speed.

    Among equal priorities, the first need explains a scale-up. No other replica can take over the queue of a
    straggler, so it must not size the fleet: stragglers are assumed to have the mean queue and KV cache use of the
    others. Their arrivals count.

    Args:
        fresh: replicas with a fresh sample, at least one. The others that receive load are assumed to have their mean
            load; in the demand's `floor` they count as fully utilized.
        loaded: number of replicas that receive load, with or without a fresh sample.
        speeds: capacity and stragglers. The capacity may be unknown only if there is neither demand nor a
            backlog.
    """
    rate = speeds.capacity.tokens_per_second if speeds.capacity else math.inf
    slow = {straggler.pod for straggler in speeds.stragglers}
    samples = [load.sample for pod, load in fresh.items() if pod not in slow]
    samples = samples or [load.sample for load in fresh.values()]
    scale = loaded / len(samples)
    supply = len(fleet.ready) - speeds.deficit
    return [
        _kv_cache(fleet, sum(sample.kv_used for sample in samples) * scale),
        _demand(fleet, demand, loaded - len(fresh), rate, policy),
        _jump(fleet, demand, rate, policy),
        _backlog(fleet, demand, sum(sample.backlog_tokens for sample in samples) * scale, rate, supply, policy),
    ]


def missing_replicas(fleet: Fleet, speeds: ReplicaSpeeds, replicas: int) -> float:
    """Return the replicas to add for failing and lost pods and stragglers; `replicas`: last decision."""
    return speeds.deficit + min(failing_replicas(fleet, replicas), math.ceil(_REPLACED_SHARE * len(fleet.ready)))


def failing_replicas(fleet: Fleet, replicas: int) -> int:
    """Return how many of the decided `replicas` are failing or lost pods.

    If there are more pods than replicas, the ReplicaSet controller deletes pods that are not ready first.
    """
    surplus = len(fleet.ready) + len(fleet.starting) + fleet.failing - replicas
    return max(0, fleet.failing - max(0, surplus))


def explain_missing(fleet: Fleet, speeds: ReplicaSpeeds) -> Change:
    """Return the reason for replicas that are added only because others fail or are slow."""
    parts = []
    if fleet.failing:
        parts.append(f"{counted(fleet.failing)} {'is' if fleet.failing == 1 else 'are'} failing or lost")
    if speeds.stragglers:
        parts.append(f"{counted(len(speeds.stragglers))} much slower than the others")
    return Change("ReplicasMissing", f"of {counted(fleet.replicas)}, {' and '.join(parts)}")


def start_seconds(fleet: Fleet) -> float:
    """Return the expected seconds from the assignment of a node to ready."""
    return expected_start(fleet.start_seconds)


def expected_start(learned: float | None) -> float:
    """Return the expected seconds of a start of which `learned` is the usual time, if it is known."""
    return max(_LEAST_START_SECONDS, learned or _DEFAULT_START_SECONDS)


def _kv_cache(fleet: Fleet, used: float) -> Need:
    """Keep the KV cache below its target utilization; `used` is the sum over replicas."""
    ready = len(fleet.ready)
    need = used / KV_SHARE
    message = f"the KV cache of {counted(ready)} is {100 * KV_SHARE * need / ready:.0f} % full"
    return Need(Change("KVCacheFull", message), priority=need, up=need, down=need)


def _demand(fleet: Fleet, demand: Demand, stale: int, rate: float, policy: Policy) -> Need:
    """Serve the slow average.

    The `stale` replicas, which have no fresh metrics, count as fully utilized. Only in `floor`: their next sample
    includes what arrived in the meantime, so the scale-down window need not remember them.
    """
    ready = len(fleet.ready)
    load = demand.slow.value / rate
    need = load / policy.utilization
    message = f"the demand uses {100 * load / ready:.0f} % of {counted(ready)}; target {100 * policy.utilization:.0f} %"
    return Need(
        Change("DemandGrew", message),
        priority=need,
        up=need if demand.slow.is_warm else 0.0,
        down=load / policy.down_utilization,
        floor=(load + stale) / policy.down_utilization,
    )


def _jump(fleet: Fleet, demand: Demand, rate: float, policy: Policy) -> Need:
    """Serve the fast average if it far exceeds the ready replicas."""
    ready = len(fleet.ready)
    load = demand.fast.value / rate
    need = load / policy.utilization
    message = (
        f"the demand of the last seconds requires {load:.1f} replicas at 100 % utilization; {counted(ready)} "
        f"ready, target {100 * policy.utilization:.0f} %"
    )
    jumped = need >= JUMP_RATIO * ready
    up = need if jumped and demand.slow.is_warm else 0.0
    return Need(Change("DemandJumped", message), priority=math.inf if jumped else 0.0, up=up)


def _backlog(fleet: Fleet, demand: Demand, backlog: float, rate: float, supply: float, policy: Policy) -> Need:
    """Serve the demand and drain `backlog` tokens; `supply`: ready replicas, in replicas of usual speed."""
    work = backlog * demand.requests.work_per_prompt_token
    # Time in which the ready replicas would drain the backlog without new arrivals.
    drain_seconds = work / (rate * supply)
    # A late backlog proves an overload, so a higher fast average is not noise.
    late = drain_seconds > policy.first_token_seconds
    arriving = max(demand.slow.value, demand.fast.value) if late else demand.slow.value
    need = (arriving + _drain_rate(fleet, work, arriving, rate, supply, policy)) / rate
    floor = demand.slow.value / rate + work / policy.first_token_seconds / rate
    message = (
        f"the backlog of {backlog:,.0f} tokens takes {drain_seconds:.3g} s on {counted(len(fleet.ready))}; "
        f"target {policy.first_token_seconds:g} s"
    )
    return Need(Change("BacklogTooLong", message), priority=need, up=need, down=need, floor=floor)


def _drain_rate(fleet: Fleet, work: float, arriving: float, rate: float, supply: float, policy: Policy) -> float:
    """Return the tokens per second that drain the backlog left when a new pod becomes ready.

    Ready and starting pods work until then, so a burst that they finish needs no more pods. The rest should drain
    within half the first-token target, or within one start time if that is longer: a pod is not worth starting for a
    shorter backlog.
    """
    start = start_seconds(fleet)
    # A pod that is late by some time is expected to need the same time again.
    serving = supply * start + sum(max(0.0, start - abs(start - passed)) for passed in fleet.starting)
    left = max(0.0, work + arriving * start - rate * serving)
    return left / max(policy.first_token_seconds / 2, start)
