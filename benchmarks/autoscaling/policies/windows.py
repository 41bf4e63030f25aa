"""Values of the last so many seconds."""

from __future__ import annotations

from collections import deque


class Window:
    """Keeps values for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        """A value of now; what is too old goes."""
        self._values.append((now, value))
        while self._values[0][0] <= now - self._seconds:
            self._values.popleft()

    def mean(self, last: float | None = None) -> float:
        """Of all, or of those of the last seconds."""
        newest = self._values[-1][0]
        values = [v for time, v in self._values if last is None or time > newest - last]
        return sum(values) / len(values)

    def largest(self) -> float:
        """The largest of all."""
        return max(value for _, value in self._values)

    def smallest(self) -> float:
        """The smallest of all."""
        return min(value for _, value in self._values)
