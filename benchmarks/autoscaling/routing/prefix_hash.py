"""Consistent hashing with bounded loads (Mirrokni et al., 2018) of a prefix, as KubeAI documents its `PrefixHash`.

Its defaults: 256 places of each replica on the ring, and at most 125 % of the mean of the requests in flight. It hashes
the first 100 characters of a chat's first message of the user; system prompts and tools are not hashed.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Sequence
from typing import Final

from benchmarks.autoscaling.fleet import Pod
from benchmarks.autoscaling.replica import Arrival, ReplicaMetrics

_PLACES: Final = 256
_MEAN_FACTOR: Final = 1.25


class PrefixHash:
    """Sends equal openings to one pod; beyond the bound on its load, to the next one on the ring."""

    scrape_seconds: float | None = None

    def __init__(self, _: random.Random) -> None:
        self._names: frozenset[str] = frozenset()
        self._ring: list[tuple[int, str]] = []

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Ignore metrics."""

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:
        """Return the first pod on the ring after the opening's place that has room."""
        by_name = {pod.name: pod for pod in pods}
        if by_name.keys() != self._names:
            self._names = frozenset(by_name)
            self._ring = sorted((_place(f"{name} {number}"), name) for name in by_name for number in range(_PLACES))
        loads = {}
        for pod in pods:
            assert pod.replica is not None
            pod.replica.run_until(arrival.time)
            loads[pod.name] = pod.replica.in_flight
        most = _MEAN_FACTOR * (sum(loads.values()) + 1) / len(pods)
        start = bisect.bisect(self._ring, (_place(f"opening {arrival.opening}"), ""))
        names = dict.fromkeys(name for _, name in [*self._ring[start:], *self._ring[:start]])
        # One pod at least has no more than the mean.
        return by_name[next(name for name in names if loads[name] + 1 <= most or loads[name] == min(loads.values()))]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
