"""Exponential averages and sliding-window maxima, as immutable values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Weight of an average after one time constant.
_WARM: Final = 1 - math.exp(-1.0) - 1e-9


@dataclass(frozen=True, slots=True)
class Average:
    """An exponentially weighted mean, corrected for bias from its first value on.

    Attributes:
        memory: time constant in seconds: a value of this age has the weight 1/e.
        total: weighted sum of the values.
        weight: sum of the weights.
    """

    memory: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, seconds: float) -> Average:
        """Return the average after a value that applied for the last `seconds`."""
        keep = math.exp(-seconds / self.memory)
        return Average(self.memory, self.total * keep + value * (1 - keep), self.weight * keep + 1 - keep)

    @property
    def is_warm(self) -> bool:
        """Whether the values cover one time constant. Before that, the mean may be noise."""
        return self.weight >= _WARM

    @property
    def value(self) -> float:
        """The mean; 0 if no value was added."""
        return self.total / self.weight if self.weight > 0 else 0.0


# Expiry times are rounded up to this fraction of the window, which bounds the entries while values keep falling.
_PARTS = 100


@dataclass(frozen=True, slots=True)
class WindowMaximum:
    """The maximum over a sliding time window.

    Attributes:
        entries: (expiry time, value), newest last. Only values larger than all newer ones can become the maximum.
    """

    entries: tuple[tuple[float, float], ...] = ()

    def add(self, time: float, value: float, window: float) -> WindowMaximum:
        """Return the window with a new value, which expires after `window` s (plus up to 1 %)."""
        part = window / _PARTS
        until = time + window if part == 0 else (math.floor(time / part) + 1) * part + window
        kept = tuple(entry for entry in self.entries if entry[0] > time and entry[1] > value)
        return WindowMaximum(kept if kept and kept[-1][0] == until else (*kept, (until, value)))

    @property
    def value(self) -> float:
        """The maximum; 0 if the window is empty."""
        return self.entries[0][1] if self.entries else 0.0
