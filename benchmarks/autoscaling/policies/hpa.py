"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) on an external metric of type AverageValue, as KEDA sets it up.

KEDA's usual trigger for vLLM-like engines is five waiting requests per replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.autoscaling.policies.windows import Window
from benchmarks.autoscaling.simulation import View

_TOLERANCE = 0.1


@dataclass(slots=True)
class Behavior:
    """The HPA's `behavior`, at its defaults: up by 100 % or 4 pods in 15 s, down by the highest of 5 minutes.

    `up`, `down`: seconds of stabilization.
    """

    up: float = 0.0
    down: float = 300.0
    period: float = 15.0
    _ups: Window = field(init=False)
    _downs: Window = field(init=False)

    def __post_init__(self) -> None:
        self._ups = Window(max(self.up, 1e-9))
        self._downs = Window(max(self.down, 1e-9))

    def limit(self, now: float, current: int, recommended: int) -> int:
        """Return a recommendation limited by the behavior."""
        self._ups.add(now, recommended)
        self._downs.add(now, recommended)
        if recommended > current:
            stable = max(current, int(self._ups.smallest()))
            return min(stable, max(2 * current, current + 4))
        return min(current, int(self._downs.largest()))


@dataclass(slots=True)
class WaitingRequests:
    """HPA on the sum of waiting requests. Pods without metrics count as zero, as in Prometheus."""

    threshold: float = 5.0
    period: float = 15.0
    _behavior: Behavior = field(default_factory=Behavior)

    def observe(self, view: View) -> int:
        """Return ceil(sum / threshold), or no change if the average is within the tolerance."""
        current = max(1, view.desired_replicas)
        if not view.replicas:
            return current
        waiting = sum(metrics.waiting for metrics in view.replicas)
        ratio = waiting / (self.threshold * current)
        recommended = current if abs(ratio - 1) <= _TOLERANCE else math.ceil(waiting / self.threshold)
        return self._behavior.limit(view.now, current, max(1, recommended))
