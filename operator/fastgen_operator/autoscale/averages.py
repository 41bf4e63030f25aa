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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The largest value of a window of time that moves on.

    Attributes:
        marks: (time, value), the newest last, each larger than all after it: no other can ever be the largest.
    """

    marks: tuple[tuple[float, float], ...] = ()

    def add(self, time: float, value: float, window: float) -> Peaks:
        """With a value of now, and without what is older than `window` seconds."""
        kept = tuple(mark for mark in self.marks if mark[0] > time - window and mark[1] > value)
        return Peaks((*kept, (time, value)))

    @property
    def largest(self) -> float:
        """The largest value; 0 where there is none."""
        return self.marks[0][1] if self.marks else 0.0
