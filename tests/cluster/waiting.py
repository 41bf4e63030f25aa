"""Waiting for a condition with a deadline, the one place of the test bed that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], *, seconds: float, every: float = 0.05) -> T:
    """Returns the first result of `look` that is neither None nor False.

    Raises TimeoutError naming `what` where there is none within `seconds`; `look` is asked at least once.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = look()
        if result is not None and result is not False:
            return result
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} seconds")
        time.sleep(every)
