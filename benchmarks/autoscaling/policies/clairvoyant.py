"""A policy that knows the trace, to show what any policy could reach at most.

It knows each request's arrival and length, how long a start takes, and what a replica computes. It orders each replica
one start before it is needed, and keeps one that is needed again before another start would pay off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.autoscaling.replica import Arrival
from benchmarks.autoscaling.simulation import View


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The desired replicas for each period of the trace."""

    plan: tuple[int, ...]
    period: float = 5.0

    def observe(self, view: View) -> int:
        """Return the replicas planned for now."""
        return self.plan[min(len(self.plan) - 1, int(view.now / self.period))]


def clairvoyant(
    arrivals: Iterable[Arrival],
    capacity: float,
    utilization: float,
    start: float,
    retention: float,
    *,
    seconds: float,
    most: int,
    period: float = 5.0,
) -> Clairvoyant:
    """Plan the replicas for a trace.

    Args:
        capacity: forward tokens per second of a replica within the targets.
        utilization: the share of the capacity to use: the one setting, as bursts shorter than a period and random
            routing need some room.
        start: the longest time from a decision to a replica that receives requests.
        retention: keep a replica that is needed again within this time: a new one would use its GPU as long.
    """
    work = [0.0] * (math.ceil(seconds / period) + 1)
    for arrival in arrivals:
        work[int(arrival.time / period)] += arrival.prompt + arrival.generate
    needed = [max(1, math.ceil(tokens / period / (capacity * utilization) - 1e-9)) for tokens in work]
    ahead, kept = math.ceil(start / period), math.ceil(retention / period)
    early = [max(needed[at : at + ahead + 1]) for at in range(len(needed))]
    return Clairvoyant(tuple(min(most, replicas) for replicas in _bridge(early, kept)), period)


def _bridge(needed: Sequence[int], gap: int) -> list[int]:
    """Fill dips of at most `gap` entries: the result is at least the lower one of the highest before and after."""
    filled = []
    for at in range(len(needed)):
        before = max(needed[max(0, at - gap) : at + 1])
        after = max(needed[at : at + gap + 1])
        filled.append(max(needed[at], min(before, after)))
    return filled
