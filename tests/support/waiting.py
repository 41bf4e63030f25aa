"""Polls for conditions with a deadline.

A deadline finds what never happens. It says nothing about speed: a process may be stopped for seconds on a machine that
does other work, too. The number that a test gives is the most that a quiet machine takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cluster.waiting import wait_for

T = TypeVar("T")

# How many times as long a wait goes on as a quiet machine takes at most.
PATIENCE = 5
# For what a quiet machine does within a minute, where something else than `eventually` waits.
HANG_SECONDS = 60.0 * PATIENCE


def eventually(poll: Callable[[], T], *, within: float, what: str, every: float = 0.2) -> T:
    """Call `poll` every `every` seconds until it returns a truthy value, and return that. Exceptions count as falsy.

    Raises:
        TimeoutError: after `PATIENCE * within` seconds, with `what` and the last value or exception.
    """
    seen: object = None

    def guarded() -> T | None:
        nonlocal seen
        try:
            value = poll()
        except Exception as error:
            seen = error
            return None
        seen = value
        return value or None

    try:
        return wait_for(what, guarded, seconds=PATIENCE * within, every=every)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; last seen: {seen!r}") from None


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Call `condition` until it returns a truthy value. An exception of it ends the wait.

    Raises:
        TimeoutError: after `PATIENCE * seconds` seconds, with `what`.
    """
    wait_for(what, lambda: bool(condition()), seconds=PATIENCE * seconds, every=0.02)
