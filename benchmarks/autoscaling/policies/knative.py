"""Knative Serving's autoscaler on concurrency (`pkg/autoscaler/scaling/autoscaler.go`), with its defaults.

A stable window of 60 s and a panic window of a tenth of it. Panic mode starts at twice the target of the ready pods,
never scales down, and ends after a stable window below the threshold. Rate limits: up 1000-fold, down by half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.autoscaling.policies.windows import Window
from benchmarks.autoscaling.simulation import View

_STABLE, _PANIC, _PANIC_THRESHOLD = 60.0, 6.0, 2.0
_UP, _DOWN = 1000.0, 2.0


@dataclass(slots=True)
class Concurrency:
    """KPA.

    Attributes:
        target: requests in flight of each pod, after the target utilization (70 % of `autoscaling.knative.dev/target`).
        delay: scale-down-delay, seconds.
    """

    target: float = 70.0
    delay: float = 0.0
    period: float = 2.0
    _seen: Window = field(default_factory=lambda: Window(_STABLE))
    _panic_since: float | None = None
    _most: int = 0
    _delayed: Window = field(init=False)

    def __post_init__(self) -> None:
        self._delayed = Window(max(self.delay, 1e-9))

    def observe(self, view: View) -> int:
        """Return the decision of one tick."""
        ready = len(view.ready)
        if not view.replicas or not ready:
            return view.desired_replicas
        # Pods without metrics count as the mean of the others.
        self._seen.add(view.now, sum(r.in_flight for r in view.replicas) * ready / len(view.replicas))
        up, down = math.ceil(_UP * ready), math.floor(ready / _DOWN)
        stable_wants = math.ceil(self._seen.mean() / self.target)
        panic_wants = math.ceil(self._seen.mean(_PANIC) / self.target)
        stable, panic = (min(max(wants, down), up) for wants in (stable_wants, panic_wants))
        over = panic_wants / ready >= _PANIC_THRESHOLD
        if over:
            if self._panic_since is None:
                self._most = 0
            self._panic_since = view.now
        elif self._panic_since is not None and view.now - self._panic_since > _STABLE:
            self._panic_since = None
        if self._panic_since is not None:
            self._most = max(self._most, stable, panic, ready)
            return self._most
        self._delayed.add(view.now, stable)
        return max(1, int(self._delayed.largest()))
