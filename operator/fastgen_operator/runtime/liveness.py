"""Progress of the operator's loops and threads, for the liveness probe.

Progress is a step, not a result: an operator that is busy, or whose API server is slow or fails, makes steps. A restart
would only delay its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

# What a thread does.
Work = Literal["reconcile", "list"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Progress:
    """The last step of the work in each thread; safe to use from several threads.

    A step is the start of the work, its end, or the end of a request to the API server, whatever the response. Each
    request has a timeout, so work without a step for longer is stuck.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: dict[int, tuple[Work, float]] = {}
        self._last: dict[Work, float] = {"reconcile": clock(), "list": clock()}

    def run(
        self, work: Work, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Call the function in this thread as work of that kind."""
        self._step(work)
        try:
            return function(*args, **kwargs)
        finally:
            self._step(work)
            with self._lock:
                del self._threads[threading.get_ident()]

    def step(self) -> None:
        """Record a step of the work in this thread, if there is any."""
        current = self._threads.get(threading.get_ident())
        if current is not None:
            self._step(current[0])

    def last(self, work: Work) -> float:
        """Return the time of the last step of any thread with that work."""
        return self._last[work]

    def stuck(self, work: Work) -> float:
        """Return the longest time without a step of a thread with that work, seconds; 0 if no thread has it."""
        with self._lock:
            steps = [at for kind, at in self._threads.values() if kind == work]
        return self._clock() - min(steps) if steps else 0.0

    def _step(self, work: Work) -> None:
        now = self._clock()
        with self._lock:
            self._threads[threading.get_ident()] = work, now
            self._last[work] = now


class Stalled(Exception):
    """A probe fails: a loop made no progress for too long, or nothing was listed yet. The message names the cause."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One measure of progress.

    Attributes:
        name: as in the probe's response, with the unit.
        age: returns the seconds since the last progress; called in the event loop.
        limit: age above which the probe fails.
    """

    name: str
    age: Callable[[], float]
    limit: float


class Heartbeat:
    """Ages of all signs as of the last beat.

    The event loop beats about once a second, and any thread may check. While the loop hangs, ages above 0 keep growing.

    Args:
        clock: monotonic seconds.
        loop_limit: seconds without a beat after which the probe fails.
    """

    def __init__(self, clock: Callable[[], float], signs: Sequence[Sign], *, loop_limit: float) -> None:
        self._clock = clock
        self._signs = tuple(signs)
        self._loop_limit = loop_limit
        self._last = self._taken()

    def beat(self) -> None:
        """Record the ages; called by the event loop."""
        self._last = self._taken()

    def check(self) -> dict[str, float]:
        """Return the ages in seconds, for the probe's response.

        Raises:
            Stalled: an age is above its limit.
        """
        aged = self._aged()
        for name, age, limit in aged:
            if age > limit:
                raise Stalled(f"{name} is {age:.1f}, above {limit:g}")
        return {name: round(age, 1) for name, age, _ in aged}

    def stalled(self, names: Collection[str]) -> float:
        """Return the longest age of the event loop and the named signs, seconds."""
        return max(age for name, age, _ in self._aged() if name in ("loopSeconds", *names))

    def _aged(self) -> list[tuple[str, float, float]]:
        """Return name, age and limit of the event loop and of each sign."""
        beaten, ages = self._last
        since = self._clock() - beaten
        # A sign with an age keeps ageing while the loop hangs; an idle one (age 0) does not.
        signs = zip(self._signs, ages, strict=True)
        return [
            ("loopSeconds", since, self._loop_limit),
            *((sign.name, age + since if age else 0.0, sign.limit) for sign, age in signs),
        ]

    def _taken(self) -> tuple[float, tuple[float, ...]]:
        # One tuple: a checking thread sees the values of a single beat.
        return self._clock(), tuple(sign.age() for sign in self._signs)
