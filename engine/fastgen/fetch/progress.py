"""Download progress as log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.filesize import decimal


def say(line: str) -> None:
    """Write one line to standard error."""
    print(f"fastgen: {line}", file=sys.stderr, flush=True)


# Minimum time between two lines.
_EVERY_SECONDS = 5.0


class Progress:
    """Counts bytes and reports progress periodically.

    Args:
        total, done: bytes of all files, and those already present.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        total: int,
        done: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = say,
    ) -> None:
        self._total, self._done, self._clock, self._tell = total, done, clock, tell
        self.received = 0
        self._told_at, self._told_received = clock(), 0

    def count(self, size: int) -> None:
        """Count received bytes, and report the progress if it is time to."""
        self.received += size
        passed = self._clock() - self._told_at
        if passed >= _EVERY_SECONDS:
            speed = round((self.received - self._told_received) / passed)
            here = self._done + self.received
            percent = 100 * here // self._total if self._total else 100
            self._tell(f"{decimal(here)} of {decimal(self._total)} ({percent} %), {decimal(speed)}/s")
            self._told_at, self._told_received = self._clock(), self.received
