"""Detects processes that do not run, whether or not they have work."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fastgen import exit_codes
from fastgen.link.messages import Failed

# A process that does not run for this long hangs.
HUNG_SECONDS = 3.0
# At least this part of all time counts, because a process that never gets a processor hangs, too.
_LEAST_PART = 0.1


class Silence:
    """Measures for how long a process has not run, although it need not wait for a processor.

    Only time in which the observer ran counts: while the machine is suspended, nothing runs.

    Args:
        period: seconds between two calls of `look`.

    Attributes:
        seconds: how long the process has not run.
    """

    def __init__(self, period: float) -> None:
        self.seconds = 0.0
        self._period = period
        self._looked: float | None = None

    @property
    def is_hung(self) -> bool:
        """Whether it has not run for more than `HUNG_SECONDS`."""
        return self.seconds > HUNG_SECONDS

    def look(self, now: float, *, is_silent: bool, starved: float) -> None:
        """Count the time since the last call.

        Args:
            now: seconds on a monotonic clock.
            is_silent: whether the process has not run since the last call.
            starved: seconds in which it has waited for a processor, since the last call.
        """
        elapsed = 0.0 if self._looked is None else min(now - self._looked, 2 * self._period)
        self._looked = now
        self.seconds = self.seconds + max(elapsed - starved, elapsed * _LEAST_PART) if is_silent else 0.0

    def failure(self) -> Failed:
        """Return the failure of a process that hangs."""
        return Failed(
            f"its process has not run for {self.seconds:.0f} s; look for stopped processes on the node", exit_codes.HUNG
        )


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, as SIGSTOP does. False if it has ended."""
    with suppress(OSError):
        # The name in parentheses may contain anything: proc_pid_stat(5).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
