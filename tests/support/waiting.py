"""Polls for conditions with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cluster.waiting import wait_for

T = TypeVar("T")


def eventually(poll: Callable[[], T], *, within: float, what: str, every: float = 0.2) -> T:
    """Call `poll` every `every` seconds until it returns a truthy value, and return that. Exceptions count as falsy.

    Raises:
        TimeoutError: after `within` seconds, with `what` and the last value or exception.
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
        return wait_for(what, guarded, seconds=within, every=every)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; last seen: {seen!r}") from None
