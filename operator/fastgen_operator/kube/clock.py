"""The time of the cluster, independent of the clock of the operator's node.

Times in objects come from other machines: when a pod started, when another operator replaced one. An operator whose own
clock is an hour ahead would find every start overdue. The API server sends its time in each response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

# Smaller differences of clocks do not matter. The header has whole seconds.
_TOLERANCE: Final = timedelta(seconds=2)


def boot_seconds() -> float:
    """Return the seconds since the machine started. Unlike monotonic(), they count also while it is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_time() -> datetime:
    """Return the time of this machine."""
    return datetime.now(UTC)


class ClusterClock:
    """The API server's time; safe to use from several threads. Until the first response, that of this machine.

    It runs on `elapsed`, so a change of the machine's clock changes nothing. It is set only if a response contradicts
    it: to the machine's clock if that agrees with the response, for its fractions of a second, else to the response.
    """

    def __init__(
        self,
        wall: Callable[[], datetime] = wall_time,
        elapsed: Callable[[], float] = boot_seconds,
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._lock = threading.Lock()
        self._set = wall(), elapsed()

    def elapsed(self) -> float:
        """Return the monotonic seconds to pass to `heard` as the beginning of a request."""
        return self._elapsed()

    def now(self) -> datetime:
        """Return the API server's current time, in UTC."""
        return self._at(self._elapsed())

    def heard(self, date: str | None, began: float) -> None:
        """Compare the clock with the Date header of a response to a request that began at `began`.

        A header that cannot be read counts as none: a proxy may have written it.
        """
        try:
            said = parsedate_to_datetime(date or "").astimezone(UTC)
        except ValueError:
            return
        # The thread may have been paused since the response was written.
        if self._at(began) - _TOLERANCE <= said <= self.now() + _TOLERANCE:
            return
        own = self._wall()
        with self._lock:
            self._set = own if abs(own - said) <= _TOLERANCE else said, self._elapsed()

    def _at(self, elapsed: float) -> datetime:
        with self._lock:
            time, then = self._set
        return time + timedelta(seconds=elapsed - then)
