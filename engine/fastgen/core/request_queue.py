"""The queue of sequences that hold no KV blocks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from fastgen.core.sequence import Rank, Sequence

# Ordinal, number of preemptions, sequence: a preempted sequence gets a new heap entry.
_HeapEntry = tuple[int, int, Sequence]
_MAX_STALE = 64


def _heap_entry(sequence: Sequence) -> _HeapEntry:
    return (sequence.ordinal, sequence.num_preemptions, sequence)


def by_rank(sequence: Sequence) -> Rank:
    """Return the sort key of a list of sequences: `sequence.rank`."""
    return sequence.rank


def _by_length(sequence: Sequence) -> tuple[int, int, int]:
    """Return the sort key by priority, then pending tokens, then arrival.

    It is constant while a sequence waits.
    """
    return (sequence.priority, sequence.num_pending_tokens, sequence.ordinal)


class RequestQueue:
    """New, preempted and swapped sequences in one queue, ordered by rank: priority, then arrival.

    The counts for statistics are maintained incrementally, because they are read after every step.

    Attributes:
        sequences: highest priority first.
        num_swapped: sequences with host blocks.
        num_prompt_tokens: prompt tokens not yet computed.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._by_length: list[Sequence] = []
        # A heap by arrival. Sequences that left the queue stay in it until they are the oldest, or too many.
        self._by_arrival: list[_HeapEntry] = []
        self.num_swapped = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    @property
    def head(self) -> Sequence | None:
        """The highest-ranked sequence, or None."""
        return self.sequences[0] if self.sequences else None

    @property
    def shortest(self) -> Sequence | None:
        """The sequence of the head's priority with the fewest pending tokens, or None."""
        return self._by_length[0] if self._by_length else None

    def push(self, sequence: Sequence) -> None:
        """Insert a sequence by rank."""
        insort(self.sequences, sequence, key=by_rank)
        insort(self._by_length, sequence, key=_by_length)
        heapq.heappush(self._by_arrival, _heap_entry(sequence))
        if len(self._by_arrival) > 2 * len(self.sequences) + _MAX_STALE:
            self._by_arrival = [_heap_entry(waiting) for waiting in self.sequences]
            heapq.heapify(self._by_arrival)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Call it before the sequence changes."""
        index = bisect_left(self.sequences, sequence.rank, key=by_rank)
        assert self.sequences[index] is sequence
        del self.sequences[index]
        index = bisect_left(self._by_length, _by_length(sequence), key=_by_length)
        assert self._by_length[index] is sequence
        del self._by_length[index]
        self._count(sequence, -1)

    def oldest_arrival(self) -> float | None:
        """Return the earliest arrival of all queued sequences, in seconds on the engine's clock."""
        while self._by_arrival and not self._by_arrival[0][2].is_waiting:
            heapq.heappop(self._by_arrival)
        return self._by_arrival[0][2].arrival if self._by_arrival else None

    def check_integrity(self) -> None:
        """Assert that both orders hold the same sequences, each in its order."""
        ranks, lengths = [s.rank for s in self.sequences], [_by_length(s) for s in self._by_length]
        assert ranks == sorted(set(ranks)), "sequences are out of order"
        assert lengths == sorted(map(_by_length, self.sequences)), "a sequence changed while it waited"

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_swapped += sign * bool(sequence.host_blocks)
        if not sequence.is_decoding:
            self.num_prompt_tokens += sign * sequence.num_pending_tokens
