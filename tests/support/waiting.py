"""Waiting for conditions, with a deadline and a word on what was awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], *, within: float, what: str, every: float = 0.2) -> T:
    """The first truthy value of `look`; exceptions of it count as "not yet" until the deadline, in seconds.

    Raises:
        TimeoutError: naming `what`, with the last value or exception seen.
    """
    deadline = time.monotonic() + within
    while True:
        seen: object
        try:
            value = look()
            if value:
                return value
            seen = value
        except Exception as error:
            seen = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within:.0f} s: {what}; last seen: {seen!r}")
        time.sleep(min(0.9, every))
