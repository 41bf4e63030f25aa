"""Timing of function calls."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_seconds(run: Callable[[], object], budget: float) -> float:
    """Return the minimum time of a call, repeated for `budget` seconds and at least three times."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
