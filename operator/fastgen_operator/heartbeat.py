"""Whether the operator does its work, for the liveness probe: an answering event loop alone proves nothing."""

from __future__ import annotations

from collections.abc import Callable

# Missed resyncs after which the process is better started again.
_MISSES = 3


class Stalled(Exception):
    """The operator has not done its work for too long; the message says what and how long."""


class Heartbeat:
    """Remembers the last complete resync. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], resync_seconds: float, oldest_wait: Callable[[], float]) -> None:
        self._clock = clock
        self._limit = max(_MISSES * resync_seconds, 30.0)
        self._oldest_wait = oldest_wait
        self._last = clock()

    def beat(self) -> None:
        """All resources have been listed and queued."""
        self._last = self._clock()

    def check(self) -> dict[str, float]:
        """Ages in seconds, for the probe's answer.

        Raises:
            Stalled: when the last resync, or the longest waiting resource, is older than three resync intervals.
        """
        ages = {"resyncSeconds": round(self._clock() - self._last, 1), "queueSeconds": round(self._oldest_wait(), 1)}
        for name, age in ages.items():
            if age > self._limit:
                raise Stalled(f"{name} is {age}, above {self._limit}")
        return ages
