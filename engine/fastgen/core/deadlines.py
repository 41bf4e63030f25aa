"""Which sequences have run out of time."""

from __future__ import annotations

import math

from fastgen.core.sequence import Sequence


class Deadlines:
    """The sequences alive that have a deadline. Asking costs nothing until one of them passes."""

    def __init__(self) -> None:
        self._alive: dict[int, Sequence] = {}
        self._next = math.inf  # no deadline is earlier; the sequence that had it may have ended since

    def __len__(self) -> int:
        return len(self._alive)

    def add(self, sequence: Sequence) -> None:
        """Watches a sequence, if it has a deadline."""
        if sequence.deadline is not None:
            self._alive[sequence.ordinal] = sequence
            self._next = min(self._next, sequence.deadline)

    def discard(self, sequence: Sequence) -> None:
        """Stops watching a sequence that has ended."""
        self._alive.pop(sequence.ordinal, None)

    def overdue(self, now: float) -> list[Sequence]:
        """Those whose deadline has come, in order of arrival; they stay watched until they are discarded."""
        if now < self._next:
            return []
        late, self._next = [], math.inf
        for sequence in self._alive.values():
            deadline = sequence.deadline
            assert deadline is not None
            if deadline <= now:
                late.append(sequence)
            else:
                self._next = min(self._next, deadline)
        return late
