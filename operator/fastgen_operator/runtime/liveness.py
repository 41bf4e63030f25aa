"""Progress of the operator's loops, for the liveness probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Stalled(Exception):
    """A loop has made no progress for too long; the message names it and the time."""


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

    The event loop beats about once a second, and any thread may check. While the loop hangs, the ages keep growing.

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
        beaten, ages = self._last
        since = self._clock() - beaten
        aged = [("loopSeconds", since, self._loop_limit)]
        # A sign with an age keeps ageing while the loop hangs; an idle one (age 0) does not.
        aged += [
            (sign.name, age + since if age else 0.0, sign.limit) for sign, age in zip(self._signs, ages, strict=True)
        ]
        for name, age, limit in aged:
            if age > limit:
                raise Stalled(f"{name} is {age:.1f}, above {limit:g}")
        return {name: round(age, 1) for name, age, _ in aged}

    def _taken(self) -> tuple[float, tuple[float, ...]]:
        # One tuple: a checking thread sees the values of a single beat.
        return self._clock(), tuple(sign.age() for sign in self._signs)
