"""The queue: sequences that hold no blocks of the cache, best first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from fastgen.core.sequence import Rank, Sequence

# Ordinal and number of preemptions: a sequence that comes back is in the heap anew.
_Arrived = tuple[int, int, Sequence]
_MOST_GONE = 64


def _by_arrival(sequence: Sequence) -> _Arrived:
    return (sequence.ordinal, sequence.num_preemptions, sequence)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RequestQueue:
    """Sequences in order of rank: priority, then arrival. New, preempted and swapped ones wait in one line.

    What the statistics ask after every pass is kept, not counted anew.
    """

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        # A heap by arrival. Those that have left the line stay in here until they are the oldest, or too many.
        self._oldest: list[_Arrived] = []
        self.num_swapped = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    @property
    def line(self) -> list[Sequence]:
        """Everyone, best first."""
        return self._line

    @property
    def first(self) -> Sequence | None:
        """The best, or None."""
        return self._line[0] if self._line else None

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence where its rank belongs."""
        insort(self._line, sequence, key=_rank)
        heapq.heappush(self._oldest, _by_arrival(sequence))
        if len(self._oldest) > 2 * len(self._line) + _MOST_GONE:
            self._oldest = [_by_arrival(waiting) for waiting in self._line]
            heapq.heapify(self._oldest)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, as it was pushed."""
        place = bisect_left(self._line, sequence.rank, key=_rank)
        assert self._line[place] is sequence
        del self._line[place]
        self._count(sequence, -1)

    def oldest_arrival(self) -> float | None:
        """When the one that has been alive longest arrived, in seconds on the engine's clock."""
        while self._oldest and not self._oldest[0][2].is_waiting:
            heapq.heappop(self._oldest)
        return self._oldest[0][2].arrival if self._oldest else None

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_swapped += sign * bool(sequence.host_blocks)
        if not sequence.is_decoding:
            self.num_prompt_tokens += sign * sequence.num_pending_tokens
