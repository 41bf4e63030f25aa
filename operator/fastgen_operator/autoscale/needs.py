"""How many replicas the load asks for, by each of the things that can run short. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.capacity import KV_SHARE, Capacity
from fastgen_operator.autoscale.demand import Demand, Track
from fastgen_operator.autoscale.observation import Fleet
from fastgen_operator.autoscale.policy import Policy

# How long a pod takes from creation to ready, until one has been seen to, and the bounds of what is believed.
USUAL_START_SECONDS: Final = 60.0
_START_BOUNDS: Final = (5.0, 900.0)


@dataclass(frozen=True, slots=True)
class Needs:
    """Replicas, as fractions: whole ones come of rounding up at the end.

    Attributes:
        load: what the demand would keep wholly busy; `jump`: the same of the last seconds alone.
        queue: what it takes to have the backlog drained in time; at least `load`.
        stay: what it takes to have the backlog of this moment drained within the first-token target. Nothing is added
            for it, which would come too late, but nothing is taken away from it either.
        kv: what holds the resident tokens with room to spare.
        backlog_tokens: prompt tokens that wait in the whole fleet.
        drain_seconds: how long the ready replicas would take for them if nothing more came.
    """

    load: float
    jump: float
    queue: float
    stay: float
    kv: float
    backlog_tokens: float
    drain_seconds: float


def assess(
    fleet: Fleet, demand: Demand, fresh: dict[str, Track], bearing: int, capacity: Capacity | None, policy: Policy
) -> Needs:
    """The needs of a fleet, `bearing` of whose replicas bear load; those in `fresh`, at least one, tell how much.

    What is missing counts as the mean of what is there. `capacity` may be None where nothing at all is asked of the
    fleet.
    """
    samples = [track.sample for track in fresh.values()]
    filled = bearing / len(samples)
    kv = sum(sample.kv_used for sample in samples) * filled / KV_SHARE
    backlog = sum(sample.backlog_tokens for sample in samples) * filled
    if capacity is None:
        return Needs(0.0, 0.0, 0.0, 0.0, kv, backlog, 0.0)
    rate = capacity.tokens_per_second
    work = backlog * demand.shape.work_per_prompt_token
    load = demand.slow.value / rate
    drain_seconds = work / (rate * len(fleet.ready))
    # A backlog that breaks the target proves the overload: the fast average is not taken for noise then.
    late = drain_seconds > policy.first_token_seconds
    arriving = max(demand.slow.value, demand.fast.value) if late else demand.slow.value
    return Needs(
        load=load,
        jump=demand.fast.value / rate,
        queue=(arriving + _left_over(fleet, work, arriving, rate, policy)) / rate,
        stay=load + work / policy.first_token_seconds / rate,
        kv=kv,
        backlog_tokens=backlog,
        drain_seconds=drain_seconds,
    )


def start_seconds(fleet: Fleet) -> float:
    """How long a pod that is asked for now takes to serve."""
    least, most = _START_BOUNDS
    return min(most, max(least, fleet.start_seconds or USUAL_START_SECONDS))


def _left_over(fleet: Fleet, work: float, arriving: float, rate: float, policy: Policy) -> float:
    """Tokens a second by which to drain what will still wait by the time that a new pod could help.

    Pods that are there, or are on their way, work meanwhile: a burst that they are through with by then needs no more
    of them. What is left is to be gone within half the first-token target; but no sooner than within another start,
    since a backlog that is over before the pods for it were worth starting only costs.
    """
    start = start_seconds(fleet)
    serving = len(fleet.ready) * start + sum(min(age, start) for age in fleet.pending_ages)
    left = max(0.0, work + arriving * start - rate * serving)
    return left / max(policy.first_token_seconds / 2, start)
