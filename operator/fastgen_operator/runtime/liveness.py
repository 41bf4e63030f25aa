"""Whether the operator does its work, for the liveness probe: an answering process alone proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Stalled(Exception):
    """The operator has not done its work for too long; the message says what and how long."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign of life.

    Attributes:
        name: for people, with its unit.
        age: seconds since the last progress; asked in the event loop.
        limit: the age from which the process is better started again.
    """

    name: str
    age: Callable[[], float]
    limit: float


class Heartbeat:
    """The ages of the signs as of the last beat; `clock` gives monotonic seconds.

    The event loop beats about once a second, and any thread may check: the ages of a loop that hangs go on growing.
    """

    def __init__(self, clock: Callable[[], float], signs: Sequence[Sign], *, loop_limit: float) -> None:
        self._clock = clock
        self._signs = tuple(signs)
        self._loop_limit = loop_limit
        self._last = self._taken()

    def beat(self) -> None:
        """The event loop turns; takes the ages."""
        self._last = self._taken()

    def check(self) -> dict[str, float]:
        """Ages in seconds, for the probe's answer.

        Raises:
            Stalled: one is above its limit.
        """
        beaten, ages = self._last
        since = self._clock() - beaten
        aged = [("loopSeconds", since, self._loop_limit)]
        # What makes no progress when the loop turns makes none while it hangs; what rests then is no older for it.
        aged += [
            (sign.name, age + since if age else 0.0, sign.limit) for sign, age in zip(self._signs, ages, strict=True)
        ]
        for name, age, limit in aged:
            if age > limit:
                raise Stalled(f"{name} is {age:.1f}, above {limit:g}")
        return {name: round(age, 1) for name, age, _ in aged}

    def _taken(self) -> tuple[float, tuple[float, ...]]:
        # One assignment of a tuple: a thread that checks sees all of one beat.
        return self._clock(), tuple(sign.age() for sign in self._signs)
