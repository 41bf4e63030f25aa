"""Each pod in turn, as proxies do by default."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.autoscaling.fleet import Pod
from benchmarks.autoscaling.replica import Arrival, ReplicaMetrics


class RoundRobin:
    """Sends each request to the pod after the one that got the last."""

    scrape_seconds: float | None = None

    def __init__(self, _: random.Random) -> None:
        self._turn = -1

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Ignore metrics."""

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:  # noqa: ARG002 - required by the interface
        """Return the next pod."""
        self._turn += 1
        return pods[self._turn % len(pods)]
