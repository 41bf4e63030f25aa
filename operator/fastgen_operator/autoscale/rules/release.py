"""Learn the scale-down window: a release that a burst soon regrets doubles it.

Pure. Times in seconds. Removing a replica saves its cost until the next burst; removing it too early costs a cold
start, in which requests are late. The trace of one burst cannot tell how often bursts recur, so the window follows the
last mistake, as TCP's retransmission timeout does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# The window is at most this many times the configured one.
MOST_FACTOR: Final = 4
# After as many windows without a mistake, the window is halved.
QUIET_WINDOWS: Final = 3


@dataclass(frozen=True, slots=True)
class Release:
    """What is known about releases of replicas.

    Attributes:
        factor: the scale-down window relative to the configured one, a power of two from 1 to `MOST_FACTOR`.
        released: time of the last scale-down that was not regretted yet.
        learned: time of the last change of `factor`.
    """

    factor: int = 1
    released: float = -math.inf
    learned: float = -math.inf

    def window(self, configured: float) -> float:
        """Return the scale-down window that applies; `configured` is that of the resource."""
        return configured * self.factor

    def after_scale_down(self, now: float) -> Release:
        """Return the state after replicas were removed."""
        return Release(self.factor, now, self.learned)

    def after_burst(self, now: float, window: float) -> Release:
        """Return the state after a burst required new replicas; `window` is the configured one.

        Within one window of the last release, longer waiting would have avoided the cold start. One release is
        regretted once.
        """
        if now - self.released > self.window(window):
            return self
        return Release(min(MOST_FACTOR, 2 * self.factor), -math.inf, now)

    def after_quiet(self, now: float, window: float) -> Release:
        """Return the state with half the window, if nothing was regretted for `QUIET_WINDOWS` windows."""
        if self.factor == 1 or now - self.learned <= QUIET_WINDOWS * self.window(window):
            return self
        return Release(self.factor // 2, self.released, now)
