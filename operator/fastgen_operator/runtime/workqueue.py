"""Work queue: one worker at a time per key, duplicates coalesced, failures retried. For one event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastgen_operator.kinds import Key


class WorkQueue:
    """Keys of resources to reconcile.

    Args:
        yields: returns whether a key is taken only if no other waits: its last reconcile was refused, and the next one
            most likely is, too. Such resources, however many and however expensive, do not delay others.
        most_yielding: how many such keys may be processed at once.
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
        most_yielding: int = 1,
    ) -> None:
        self._first, self._limit, self._jitter, self._clock = first, limit, jitter, clock
        self._yields, self._most_yielding = yields, most_yielding
        # Time of `add`, oldest first.
        self._waiting: dict[Key, float] = {}
        self._yielding: dict[Key, float] = {}
        self._processing: dict[Key, bool] = {}  # whether it yields
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._retries: dict[Key, asyncio.TimerHandle] = {}
        self._due: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Queue a key; one that is being processed is queued again afterwards, as the change may have come too late."""
        if key in self._processing:
            self._again.add(key)
            return
        if self._yields(key):
            if key not in self._waiting:
                self._yielding.setdefault(key, self._clock())
        else:
            self._waiting.setdefault(key, self._yielding.pop(key, self._clock()))
        self._wake.set()

    def add_idle(self, key: Key) -> None:
        """Queue a key, unless its retry is pending: nothing has happened that makes another attempt more useful now."""
        if key not in self._retries:
            self.add(key)

    def add_after(self, key: Key, seconds: float | None) -> None:
        """Queue a key in `seconds`, whatever happens before, instead of at its earlier such time; None: not at all."""
        self._set_timer(self._due, key, None if seconds is None else max(0.0, seconds))

    async def take(self) -> Key:
        """Return the key that has waited longest, waiting for one if needed; `done` or `retry` must follow."""
        while (lane := self._next_lane()) is None:
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(lane))
        del lane[key]
        self._processing[key] = lane is self._yielding
        return key

    def _next_lane(self) -> dict[Key, float] | None:
        if self._waiting:
            return self._waiting
        may_yield = sum(self._processing.values()) < self._most_yielding
        return self._yielding if self._yielding and may_yield else None

    def done(self, key: Key) -> None:
        """End the processing of a key, without a retry."""
        self._failures.pop(key, None)
        self._set_timer(self._retries, key, None)
        self._finish(key)

    def retry(self, key: Key, *, after: float = 0.0) -> None:
        """End the processing of a key, and queue it again after a backoff, or at once if it was added meanwhile.

        Args:
            after: minimum of the backoff, seconds.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._limit, self._first * 2 ** min(failures, 30)) * (0.5 + 0.5 * self._jitter())
        self._set_timer(self._retries, key, max(delay, after))
        self._finish(key)

    def oldest_wait(self) -> float:
        """Return the longest wait of a key, seconds; 0 if none waits."""
        times = [*self._waiting.values(), *self._yielding.values()]
        return self._clock() - min(times) if times else 0.0

    def _finish(self, key: Key) -> None:
        del self._processing[key]
        # Another key may be taken now that yields.
        self._wake.set()
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _set_timer(self, timers: dict[Key, asyncio.TimerHandle], key: Key, seconds: float | None) -> None:
        if (timer := timers.pop(key, None)) is not None:
            timer.cancel()
        if seconds is not None:
            timers[key] = asyncio.get_running_loop().call_later(seconds, self._fire, timers, key)

    def _fire(self, timers: dict[Key, asyncio.TimerHandle], key: Key) -> None:
        timers.pop(key, None)
        self.add(key)
