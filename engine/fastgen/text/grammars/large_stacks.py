"""Threads with large stacks, for the grammar library.

It walks grammars recursively. On a usual stack, a chain of 3,000 rules ends the process. What passed the rehearsal on a
small stack has many times that here. Only the pages that are used take memory.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

# Stack of a rehearsal, and the one of these threads: the same work takes the same stack.
REHEARSAL_STACK_BYTES = 4 << 20
_STACK_BYTES = 16 * REHEARSAL_STACK_BYTES
# The size is a setting of the whole process, for threads that start from now on.
_SETTING = threading.Lock()


def large_stack_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads have been started, with large stacks."""
    executor = ThreadPoolExecutor(count, name)
    together = threading.Barrier(count)
    with _SETTING:
        before = threading.stack_size(_STACK_BYTES)
        try:
            wait([executor.submit(together.wait) for _ in range(count)])
        finally:
            threading.stack_size(before)
    return executor
