"""Work queue: one worker at a time per key, duplicates coalesced, failures retried. For one event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from fastgen_operator.kinds import Key

# Bands of waiting keys, in the order in which they are taken.
_CHANGED, _LISTED, _REFUSED = range(3)
# Changed keys that are taken in a row while listed ones wait, so that these wait for a limited time only.
_IN_A_ROW: Final = 3


class WorkQueue:
    """Keys of resources to reconcile, in three bands, each first in, first out.

    Changed keys are taken first: a resource that a user edits does not wait until all resources of a large cluster have
    been reconciled after a start. Listed keys are those of lists and resyncs, and new resources: their first reconciles
    take longest, and a hundred of them must not delay resources that serve. Refused keys are those of `yields`.

    Args:
        yields: returns whether a key is taken only if no key of another band can be: its last reconcile was refused,
            and the next one most likely is, too. Such resources, however many and expensive, do not delay others.
        is_new: returns whether a key has never been reconciled.
        workers: how many keys are processed at once, at most half of them (rounded up) refused ones. A namespace gets
            at most half of the workers that the other namespaces leave, rounded up: where an admission webhook takes
            ten seconds for each write, this delays no other namespace.
        first, limit: seconds before the first retry, and the maximum; the backoff doubles in between.
        jitter: returns a number from 0 to 1; a retry waits between 50 and 100 % of its backoff.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        first: float,
        limit: float,
        jitter: Callable[[], float],
        clock: Callable[[], float],
        yields: Callable[[Key], bool] = lambda _: False,
        is_new: Callable[[Key], bool] = lambda _: False,
        workers: int = 2,
    ) -> None:
        self._first, self._limit, self._jitter, self._clock = first, limit, jitter, clock
        self._yields, self._is_new, self._workers = yields, is_new, workers
        # Time of `add`, oldest first.
        self._bands: tuple[dict[Key, float], ...] = ({}, {}, {})
        self._in_a_row = 0
        self._processing: dict[Key, int] = {}  # the band it was taken from
        self._again: dict[Key, int] = {}  # the band to return to
        self._failures: dict[Key, int] = {}
        self._retries: dict[Key, asyncio.TimerHandle] = {}
        self._due: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Queue a changed key. One in processing is queued again: its reconcile may have missed the change."""
        self._put(key, _CHANGED)

    def add_listed(self, key: Key) -> None:
        """Queue a key that a list has shown, behind changed ones."""
        self._put(key, _LISTED)

    def add_idle(self, key: Key) -> None:
        """Queue a key of a resync, unless its retry is pending: an earlier attempt would likely fail again."""
        if key not in self._retries:
            self.add_listed(key)

    def add_after(self, key: Key, seconds: float | None) -> None:
        """Queue a key after `seconds`, instead of at the time of the last call. None only cancels that time."""
        self._cancel(self._due, key)
        if seconds is not None:
            self._set_timer(self._due, key, max(0.0, seconds), _CHANGED)

    async def take(self) -> Key:
        """Return the next key, waiting for one if needed; `done` or `retry` must follow.

        Changed keys come first; while listed ones wait, too, every fourth key is a listed one. Refused keys come last.
        Keys of a namespace that has its share of the workers are skipped, and refused keys while half of the workers
        process such keys.
        """
        while (found := self._next()) is None:
            self._wake.clear()
            await self._wake.wait()
        band, key = found
        del self._bands[band][key]
        self._in_a_row = self._in_a_row + 1 if band == _CHANGED else 0
        self._processing[key] = band
        return key

    def _put(self, key: Key, band: int) -> None:
        if key in self._processing:
            self._again[key] = min(band, self._again.get(key, band))
            return
        if self._yields(key):
            band = _REFUSED
        elif band == _CHANGED and self._is_new(key):
            band = _LISTED
        before = next((each for each, keys in enumerate(self._bands) if key in keys), None)
        if before is None:
            self._bands[band][key] = self._clock()
        elif band < before:
            self._bands[band][key] = self._bands[before].pop(key)
        self._wake.set()

    def _next(self) -> tuple[int, Key] | None:
        """Return the band and the key to take now; None if no waiting key may be taken."""
        processed = Counter(namespace for namespace, _ in self._processing)
        left = self._workers - len(self._processing)
        # A namespace with n workers gets another while n < (left + n) / 2.
        changed, listed, refused = (
            next(((band, key) for key in keys if not (held := processed[key[0]]) or held < left), None)
            for band, keys in enumerate(self._bands)
        )
        if changed and (not listed or self._in_a_row < _IN_A_ROW):
            return changed
        may_yield = 2 * list(self._processing.values()).count(_REFUSED) < self._workers
        return listed or (refused if may_yield else None)

    def done(self, key: Key) -> None:
        """End the processing of a key, without a retry."""
        self._failures.pop(key, None)
        self._cancel(self._retries, key)
        self._finish(key)

    def retry(self, key: Key, *, after: float = 0.0) -> None:
        """End the processing of a key, and queue it after a backoff; also at once if it was added meanwhile.

        Args:
            after: minimum of the backoff, seconds.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._limit, self._first * 2 ** min(failures, 30)) * (0.5 + 0.5 * self._jitter())
        self._cancel(self._retries, key)
        self._set_timer(self._retries, key, max(delay, after), self._processing[key])
        self._finish(key)

    def oldest_wait(self) -> float:
        """Return the longest wait of a key, seconds; 0 if none waits."""
        times = [time for keys in self._bands for time in keys.values()]
        return self._clock() - min(times) if times else 0.0

    def _finish(self, key: Key) -> None:
        del self._processing[key]
        # A refused key, or one of the same namespace, may be taken now.
        self._wake.set()
        if (band := self._again.pop(key, None)) is not None:
            self._put(key, band)

    def _set_timer(self, timers: dict[Key, asyncio.TimerHandle], key: Key, seconds: float, band: int) -> None:
        timers[key] = asyncio.get_running_loop().call_later(seconds, self._fire, timers, key, band)

    def _cancel(self, timers: dict[Key, asyncio.TimerHandle], key: Key) -> None:
        if (timer := timers.pop(key, None)) is not None:
            timer.cancel()

    def _fire(self, timers: dict[Key, asyncio.TimerHandle], key: Key, band: int) -> None:
        timers.pop(key, None)
        # A key that is no longer refused is a listed one.
        self._put(key, min(band, _LISTED))
