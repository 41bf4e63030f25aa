"""KubeAI's autoscaler (`internal/modelautoscaler`): the mean of active requests over ten minutes, divided by a target.

Every 10 s; scales down only after `scaleDownDelaySeconds` (30) of consecutive lower recommendations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.autoscaling.policies.windows import Window
from benchmarks.autoscaling.simulation import View


@dataclass(slots=True)
class ActiveRequests:
    """KubeAI; `target` is `targetRequests` (default 100), `window` the averaging time in seconds."""

    target: float = 100.0
    window: float = 600.0
    period: float = 10.0
    _seen: Window = field(init=False)
    _lower: int = 0

    def __post_init__(self) -> None:
        self._seen = Window(self.window)

    def observe(self, view: View) -> int:
        """Return ceil(mean / target), delayed if lower. Its proxy counts requests, so lost scrapes do not matter."""
        if not view.replicas:
            return view.desired_replicas
        self._seen.add(view.now, sum(r.in_flight for r in view.replicas) * len(view.ready) / len(view.replicas))
        recommended = max(1, math.ceil(self._seen.mean() / self.target))
        if recommended >= view.desired_replicas:
            self._lower = 0
            return recommended
        self._lower += 1
        if self._lower < math.ceil(30.0 / self.period):
            return view.desired_replicas
        self._lower = 0
        return recommended
