"""Compute what the sequences of a step may generate, without one waiting for another."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from fastgen.core.constraint import Constraint
from fastgen.text.grammars.large_stacks import large_stack_threads
from fastgen.text.grammars.limits import WAIT_SECONDS
from fastgen.text.grammars.matcher import GrammarMatcher

# Threads for slow grammars, which yield to all others; and further ones for masks that turn out to be slow.
_SLOW_THREADS = 1
_SPARE_THREADS = 4
_YIELDING = 10


class MaskThreads:
    """Threads with large stacks that compute masks.

    Args:
        num_threads: threads that compute the masks of a step.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = large_stack_threads(num_threads + _SPARE_THREADS, "mask")
        self._slow_threads = large_stack_threads(_SLOW_THREADS, "slow-mask")
        self._num_mask_threads, self._num_all_threads = num_threads, num_threads + _SPARE_THREADS
        self._late: list[Future[None]] = []  # of earlier steps

    def fill(self, constraints: Sequence[Constraint], masks: memoryview) -> list[int]:
        """Write the masks of several constraints in parallel, without the GIL, but only wait a short time.

        Masks that take too long are finished in the background, for a later step. Those of a slow grammar are computed
        in a thread of their own from the beginning.

        Args:
            constraints: those of a step.
            masks: a writable array of uint32 words: the row of the first constraint, then that of the next.

        Returns:
            The indices of the constraints whose masks are not known in time. Their rows are unchanged.
        """
        unknown = [each for each in constraints if isinstance(each, GrammarMatcher) and each.needs_mask]
        quick = []
        for each in unknown:
            if each.is_slow:
                each.is_pending = True
                self._slow_threads.submit(_find_slowly, weakref.ref(each))
            elif not each.is_blocked:
                quick.append(each)
        self._find(quick)
        width, late = len(masks) // len(constraints), []
        for row, constraint in enumerate(constraints):
            if constraint.is_pending or (isinstance(constraint, GrammarMatcher) and constraint.needs_mask):
                late.append(row)
            else:
                constraint.fill_mask(masks[row * width : (row + 1) * width])
        return late

    def _find(self, constraints: Sequence[GrammarMatcher]) -> None:
        """Compute masks, waiting at most `WAIT_SECONDS`. Those that have not been begun by then are left out."""
        self._late = [finding for finding in self._late if not finding.done()]
        num_shares = min(len(constraints), self._num_mask_threads, self._num_all_threads - len(self._late))
        # Each thread takes every n-th constraint. The library releases the GIL while it computes.
        shares = [deque(constraints[first::num_shares]) for first in range(num_shares)]
        for constraint in constraints[: len(constraints) if shares else 0]:
            constraint.is_pending = True
        until = time.monotonic() + WAIT_SECONDS
        for share, finding in [(share, self._threads.submit(_find_all, share)) for share in shares]:
            try:
                finding.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._late.append(finding)
                for constraint in _drained(share):
                    constraint.is_pending = False


def _drained(share: deque[GrammarMatcher]) -> Iterator[GrammarMatcher]:
    """Take constraints out of a share, which another thread may empty at the same time."""
    with suppress(IndexError):
        while True:
            yield share.popleft()


def _find_all(share: deque[GrammarMatcher]) -> None:
    for constraint in _drained(share):
        constraint.find_mask()


def _find_slowly(constraint: weakref.ref[GrammarMatcher]) -> None:
    """Compute a mask unless the request has ended meanwhile."""
    os.setpriority(os.PRIO_PROCESS, 0, _YIELDING)  # of this thread
    found = constraint()
    if found is not None:
        found.find_mask()
