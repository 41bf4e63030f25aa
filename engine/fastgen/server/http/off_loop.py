"""Runs work for requests with large bodies in a thread, so that the event loop continues."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastgen.server.http.request_context import current

T = TypeVar("T")

# A body is large beyond this many bytes, or objects, lists and strings, or other values. Work on less takes a few
# milliseconds.
_SMALL_BYTES = 1 << 18
_SMALL_NODES = 1 << 11
_SMALL_ITEMS = 1 << 16
# One thread: the event loop waits for the interpreter's lock behind at most one other thread, which gives it up every
# few milliseconds.
_THREAD = ThreadPoolExecutor(1, "large-body")
# A turn of the event loop seldom computes for longer.
_TURN_SECONDS = 0.005


def is_large(num_bytes: int, num_nodes: int, num_items: int) -> bool:
    """Return whether work for a body of this size should not run in the event loop."""
    return num_bytes > _SMALL_BYTES or num_nodes > _SMALL_NODES or num_items > _SMALL_ITEMS


async def off_loop(work: Callable[..., T], *arguments: object) -> T:
    """Return `work(*arguments)`. If the current request has a large body, it runs in the thread for these."""
    if not current().is_large:
        return work(*arguments)
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_THREAD, run, _after_a_turn, work, *arguments)


def _after_a_turn(work: Callable[..., T], *arguments: object) -> T:
    # Otherwise the thread takes the lock back within a turn of the event loop, which waits for one call of a parser
    # after another.
    time.sleep(_TURN_SECONDS)
    return work(*arguments)


def prefer_event_loop() -> None:
    """Set up the interpreter so that other threads and garbage collections block the event loop only briefly.

    A garbage collection holds the interpreter's lock, for a tenth of a second with a million objects. Objects that
    exist now are excluded, because they stay. New ones are collected while they are young, old ones rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 200)
    sys.setswitchinterval(0.001)
