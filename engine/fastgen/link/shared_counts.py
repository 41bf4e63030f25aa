"""Counts that the API processes of one engine share: each writes its own and reads the sums."""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass


class Count(enum.IntEnum):
    """The counts of a process."""

    PLACES = 0
    """Requests in the engine, and admitted ones that are not sent yet."""
    OPEN = 1
    """Open HTTP POST requests."""
    SERVING = 2
    """1 once the process accepts requests."""
    AWAITING = 3
    """1 while the process waits for the engine to finish a step."""


class SharedCounts:
    """A row of counts per process, in memory that forks share. No locks: only one process writes a row.

    Create it before forking.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.values = memoryview(mmap.mmap(-1, num_processes * len(Count) * 8)).cast("q")

    def of(self, process: int) -> Counts:
        """Return the counts as one process sees them."""
        return Counts(self, process)

    def clear(self, process: int) -> None:
        """Set the counts of a process that has exited to 0."""
        for count in Count:
            self.of(process).set(count, 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one process, and the sums of all."""

    shared: SharedCounts
    process: int

    @classmethod
    def of_only_process(cls) -> Counts:
        """Return the counts of a server with one API process."""
        return SharedCounts(1).of(0)

    def set(self, count: Count, value: int) -> None:
        """Set this process's count."""
        self.shared.values[self.process * len(Count) + count] = value

    def total(self, count: Count) -> int:
        """Return the sum over all processes."""
        return sum(self.shared.values[count :: len(Count)])
