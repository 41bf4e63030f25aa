"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_seconds(run: Callable[[], object], budget: float) -> float:
    """The least time of a call, repeated for `budget` seconds and three times at least."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
