"""Learn the scale-down window: it doubles if a burst follows soon after a scale-down. Pure.

Removing a replica saves its cost until the next burst. Removing it too early costs a cold start, during which requests
are late. One burst does not show how often bursts recur, so the window follows the last mistake, as TCP's
retransmission timeout does. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# The window is at most this many times the configured one.
MOST_FACTOR: Final = 4
# The window is halved after this many windows without a mistake.
QUIET_WINDOWS: Final = 3


@dataclass(frozen=True, slots=True)
class ScaleDownWindow:
    """The learned window.

    Attributes:
        factor: the scale-down window relative to the configured one, a power of two from 1 to `MOST_FACTOR`.
        released: time of the last scale-down, unless it already counted as a mistake.
        learned: time of the last mistake, or of the last halving if that was later.
    """

    factor: int = 1
    released: float = -math.inf
    learned: float = -math.inf

    def seconds(self, configured: float) -> float:
        """Return the scale-down window that applies instead of the `configured` one."""
        return configured * self.factor

    def after_scale_down(self, now: float) -> ScaleDownWindow:
        """Return the state after replicas were removed."""
        return ScaleDownWindow(self.factor, now, self.learned)

    def after_burst(self, now: float, configured: float) -> ScaleDownWindow:
        """Double the window, up to `MOST_FACTOR`, if a burst follows within one window of the last scale-down.

        A longer window would have avoided the cold start. A scale-down counts as a mistake once.
        """
        if now - self.released > self.seconds(configured):
            return self
        return ScaleDownWindow(min(MOST_FACTOR, 2 * self.factor), -math.inf, now)

    def after_quiet(self, now: float, configured: float) -> ScaleDownWindow:
        """Halve the window after `QUIET_WINDOWS` windows without a mistake."""
        if self.factor == 1 or now - self.learned <= QUIET_WINDOWS * self.seconds(configured):
            return self
        return ScaleDownWindow(self.factor // 2, self.released, now)
