"""Which resources are to be visited: each at most once at a time, wake-ups coalesced, failures backed off.

Everything here runs in one event loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastgen_operator.kinds import Key


class WorkQueue:
    """Keys to visit.

    Args:
        first, limit: seconds before the first retry, and the most before any; it doubles in between.
        jitter: gives numbers from 0 to 1; a retry waits between half its time and all of it.
        clock: monotonic seconds.
    """

    def __init__(self, *, first: float, limit: float, jitter: Callable[[], float], clock: Callable[[], float]) -> None:
        self._first, self._limit, self._jitter, self._clock = first, limit, jitter, clock
        self._waiting: dict[Key, float] = {}  # when it was asked for, oldest first
        self._visiting: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Asks for a visit. One that is going on has perhaps not seen what is new: it is followed by another."""
        if key in self._visiting:
            self._again.add(key)
            return
        self._waiting.setdefault(key, self._clock())
        self._wake.set()

    async def take(self) -> Key:
        """The key that waits longest, as soon as there is one; `done` or `retry` must follow."""
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._visiting.add(key)
        return key

    def done(self, key: Key) -> None:
        """The visit came to its end."""
        self._failures.pop(key, None)
        self._cancel_timer(key)
        self._leave(key)

    def retry(self, key: Key, *, after: float = 0.0) -> None:
        """The visit failed: another one follows after a back-off, or at the next event, which may be the remedy.

        `after`: seconds that the back-off takes at least.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(self._limit, self._first * 2 ** min(failures, 30)) * (0.5 + 0.5 * self._jitter())
        delay = max(delay, after)
        self._cancel_timer(key)
        self._timers[key] = asyncio.get_running_loop().call_later(delay, self._fire, key)
        self._leave(key)

    def oldest_wait(self) -> float:
        """Seconds that the longest waiting key has waited; 0 where none waits."""
        return self._clock() - min(self._waiting.values()) if self._waiting else 0.0

    def _leave(self, key: Key) -> None:
        self._visiting.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
