"""The queue of sequences that hold no cache blocks, and the deadlines of all unfinished sequences."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from fastgen.core.sequence import Rank, Sequence


def by_rank(sequence: Sequence) -> Rank:
    """Return the sort key of a list of sequences: `sequence.rank`."""
    return sequence.rank


def _by_length(sequence: Sequence) -> tuple[int, int, int]:
    """Return the sort key: priority, pending tokens, arrival. It is constant while a sequence waits."""
    return (sequence.priority, sequence.num_pending_tokens, sequence.ordinal)


def _by_arrival(sequence: Sequence) -> int:
    return sequence.ordinal


class RequestQueue:
    """New, preempted and swapped sequences, ordered by rank: priority, then arrival.

    The counts are maintained incrementally, because statistics read them after every step.

    Attributes:
        sequences: highest priority first.
        num_swapped: sequences with host blocks.
        num_prompt_tokens: tokens to compute of prompts, and of preempted sequences that are recomputed.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._by_length: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        self._orders: tuple[tuple[list[Sequence], Callable[[Sequence], Any]], ...] = (
            (self.sequences, by_rank),
            (self._by_length, _by_length),
            (self._by_arrival, _by_arrival),
        )
        self.num_swapped = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def shortest(self, priority: int) -> Sequence | None:
        """Return the sequence of `priority` with the fewest pending tokens.

        None if the queue is empty, or has a sequence of a higher priority or none of this one.
        """
        return self._by_length[0] if self._by_length and self._by_length[0].priority == priority else None

    def oldest_arrival(self) -> float:
        """Return the earliest arrival of all queued sequences; infinity if there are none."""
        return self._by_arrival[0].arrival if self._by_arrival else math.inf

    def push(self, sequence: Sequence) -> None:
        """Insert a sequence into each order."""
        for order, key in self._orders:
            insort(order, sequence, key=key)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Call it before the sequence changes."""
        for order, key in self._orders:
            index = bisect_left(order, key(sequence), key=key)
            assert order[index] is sequence
            del order[index]
        self._count(sequence, -1)

    def check_integrity(self) -> None:
        """Assert that all orders hold the same sequences, each in its order."""
        for order, key in self._orders:
            keys = [key(sequence) for sequence in order]
            assert keys == sorted(map(key, self.sequences)), "a sequence changed while it waited"
            assert len(keys) == len(set(keys)), "a sequence is queued twice"

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_swapped += sign * bool(sequence.host_blocks)
        if not sequence.is_decoding:
            self.num_prompt_tokens += sign * sequence.num_pending_tokens


class Deadlines:
    """The unfinished sequences with a deadline. `overdue` costs nothing until one of the deadlines passes."""

    def __init__(self) -> None:
        self._deadlines: dict[Sequence, float] = {}
        self._earliest = math.inf  # a lower bound: the sequence with this deadline may have ended since

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, sequence: Sequence) -> None:
        """Track a sequence, if it has a deadline."""
        if sequence.deadline is not None:
            self._deadlines[sequence] = sequence.deadline
            self._earliest = min(self._earliest, sequence.deadline)

    def discard(self, sequence: Sequence) -> None:
        """Stop tracking a finished sequence."""
        self._deadlines.pop(sequence, None)

    def overdue(self, now: float) -> list[Sequence]:
        """Return the sequences whose deadline has passed, by arrival; they are tracked until discarded."""
        if now < self._earliest:
            return []
        self._earliest = min((deadline for deadline in self._deadlines.values() if deadline > now), default=math.inf)
        return [sequence for sequence, deadline in self._deadlines.items() if deadline <= now]
