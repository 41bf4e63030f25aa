"""A sliding time window of values."""

from __future__ import annotations

from collections import deque


class Window:
    """Values of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """Add a value and drop expired ones."""
        self._values.append((now, value))
        while self._values[0][0] <= now - self._seconds:
            self._values.popleft()

    def mean(self, last: float | None = None) -> float:
        """Return the mean of all values, or of the last `last` seconds."""
        newest = self._values[-1][0]
        values = [v for time, v in self._values if last is None or time > newest - last]
        return sum(values) / len(values)

    def largest(self) -> float:
        """Return the maximum."""
        return max(value for _, value in self._values)

    def smallest(self) -> float:
        """Return the minimum."""
        return min(value for _, value in self._values)
