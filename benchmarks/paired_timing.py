"""Times of alternating calls, and which clock they are taken with. Import it before torch.

On a machine that does other work, wall time is meaningless: `--one-thread` compares the processor time of one thread.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable

from fastgen.kernels.cpu import environment

ONE_THREAD = "--one-thread" in sys.argv
# OpenMP and numba read their environment once.
if ONE_THREAD:
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
environment.prepare()

NUM_THREADS = 1 if ONE_THREAD else environment.usable_cpus()
clock = time.thread_time if ONE_THREAD else time.perf_counter


def quartiles(ratios: Iterable[float]) -> str:
    """Return the median with the first and third quartile."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
