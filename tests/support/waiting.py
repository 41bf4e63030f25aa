"""Waiting for conditions, with a deadline and a word on what was awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cluster.waiting import wait_for

T = TypeVar("T")


def eventually(look: Callable[[], T], *, within: float, what: str, every: float = 0.2) -> T:
    """The first truthy value of `look`; exceptions of it count as "not yet" until the deadline, in seconds.

    Raises:
        TimeoutError: naming `what`, with the last value or exception seen.
    """
    seen: object = None

    def guarded() -> T | None:
        nonlocal seen
        try:
            value = look()
        except Exception as error:
            seen = error
            return None
        seen = value
        return value or None

    try:
        return wait_for(what, guarded, seconds=within, every=every)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; last seen: {seen!r}") from None
