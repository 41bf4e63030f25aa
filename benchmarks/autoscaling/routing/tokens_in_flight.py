"""Tokens in flight, and a known prefix until its replica is saturated: the default of llm-d's router since 0.10.

As its documentation describes the plugins: a replica that was sent at least 80 % of the prompt's blocks is kept to,
unless its expected time to first token, the uncached prompt tokens in flight divided by the calibrated peak of prompt
tokens per second, exceeds that of the least loaded one by more than a penalty. Of the replicas that are left, the one
with the fewest uncached tokens, those of the request included, gets it. Tokens are in flight until the answer ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from benchmarks.autoscaling.device import Device
from benchmarks.autoscaling.fleet import MakeRouting, Pod
from benchmarks.autoscaling.replica import Arrival, ReplicaMetrics
from benchmarks.autoscaling.routing.unended import Unended
from benchmarks.autoscaling.steps import BLOCK_TOKENS
from fastgen_gateway.routing.prefix_index import PrefixIndex

_STICKY_SHARE: Final = 0.8
_MOST_PREFIXES: Final = 400_000


def tokens_in_flight(device: Device, penalty: float) -> MakeRouting:
    """Return the routing, calibrated for a device.

    Args:
        device: one full step of an idle replica gives the peak.
        penalty: seconds by which a known prefix may delay the first token.
    """
    step = device.base + device.token * device.token_budget
    return lambda rng: TokensInFlight(rng, device.token_budget / step, penalty)


class TokensInFlight:
    """The routing; `peak` in prompt tokens per second, `penalty` in seconds."""

    scrape_seconds: float | None = None

    def __init__(self, rng: random.Random, peak: float, penalty: float) -> None:
        self._rng, self._peak, self._penalty = rng, peak, penalty
        self._prefixes = PrefixIndex(_MOST_PREFIXES)
        self._unended = Unended[int]()
        self._names: set[str] = set()

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Ignore metrics."""

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:
        """Return the pod of a request."""
        for _ in self._unended.end(pods, arrival.time):
            pass
        names = {pod.name for pod in pods}
        for gone in self._names - names:
            self._prefixes.forget(gone)
        self._names = names
        blocks = arrival.blocks[: arrival.prompt // BLOCK_TOKENS]
        matches = self._prefixes.matches(blocks)
        loads = {pod: sum(self._unended.of(pod)) for pod in pods}
        own = {pod: max(1, arrival.prompt - matches.get(pod.name, 0) * BLOCK_TOKENS) for pod in pods}
        sticky = [pod for pod in pods if blocks and matches.get(pod.name, 0) >= _STICKY_SHARE * len(blocks)]
        if sticky:
            delay = (min(loads[pod] for pod in sticky) - min(loads.values())) / self._peak
            candidates = sticky if delay <= self._penalty else pods
        else:
            candidates = pods
        least = min(loads[pod] + own[pod] for pod in candidates)
        chosen = self._rng.choice([pod for pod in candidates if loads[pod] + own[pod] == least])
        self._unended.add(chosen, arrival, own[chosen])
        self._prefixes.add(blocks, chosen.name)
        return chosen
