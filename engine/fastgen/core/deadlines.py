"""Tracks which sequences are past their deadline."""

from __future__ import annotations

import math

from fastgen.core.sequence import Sequence


class Deadlines:
    """The unfinished sequences with a deadline.

    `overdue` costs nothing until one of the deadlines passes.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._earliest = math.inf  # a lower bound: the sequence with this deadline may have ended since

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Track a sequence, if it has a deadline."""
        if sequence.deadline is not None:
            self._sequences[sequence.ordinal] = sequence
            self._earliest = min(self._earliest, sequence.deadline)

    def discard(self, sequence: Sequence) -> None:
        """Stop tracking a finished sequence."""
        self._sequences.pop(sequence.ordinal, None)

    def overdue(self, now: float) -> list[Sequence]:
        """Return the sequences whose deadline has passed, by arrival; they are tracked until discarded."""
        if now < self._earliest:
            return []
        late, self._earliest = [], math.inf
        for sequence in self._sequences.values():
            deadline = sequence.deadline
            assert deadline is not None
            if deadline <= now:
                late.append(sequence)
            else:
                self._earliest = min(self._earliest, deadline)
        return late
