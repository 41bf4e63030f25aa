"""Waits for conditions with a deadline. Nothing else in the test bed sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, poll: Callable[[], T | None], *, seconds: float, every: float = 0.05) -> T:
    """Call `poll` at least once until its result is neither None nor False, and return that result.

    Raises TimeoutError naming `what` after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = poll()
        if result is not None and result is not False:
            return result
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} seconds")
        time.sleep(every)
