"""Averages that fade, as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Average:
    """A mean in which what is `memory` seconds old counts 1/e; unbiased from its first value on.

    Attributes:
        total, weight: sums of values and of their weights.
    """

    memory: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, seconds: float) -> Average:
        """The average with a value that held for the last `seconds`."""
        keep = math.exp(-seconds / self.memory)
        return Average(self.memory, self.total * keep + value * (1 - keep), self.weight * keep + 1 - keep)

    @property
    def value(self) -> float:
        """The mean; 0 where nothing was added."""
        return self.total / self.weight if self.weight > 0 else 0.0


# A window is remembered in this many parts: a load that falls all day leaves no more marks than that.
_PARTS = 100


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest value of a window of time that moves on.

    Attributes:
        marks: (until when, value), the newest last, each larger than all after it: no other can ever be the largest.
    """

    marks: tuple[tuple[float, float], ...] = ()

    def add(self, time: float, value: float, window: float) -> Peaks:
        """With a value of now, and without what is older than `window` seconds, or up to a hundredth more."""
        part = window / _PARTS
        until = time + window if part == 0 else (math.floor(time / part) + 1) * part + window
        kept = tuple(mark for mark in self.marks if mark[0] > time and mark[1] > value)
        if kept and kept[-1][0] == until:
            return Peaks(kept)
        return Peaks((*kept, (until, value)))

    @property
    def largest(self) -> float:
        """The largest value; 0 where there is none."""
        return self.marks[0][1] if self.marks else 0.0
