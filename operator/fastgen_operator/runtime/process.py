"""Set up the operator's process: logging, limit on open files, garbage collection, signals, end of the event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

from fastgen.logs import JSONFormatter

# As many as there are ports of one address.
_MOST_FILES: Final = 65536
# Thresholds of Python's garbage collector: new containers before a collection of the youngest generation, and
# collections of a generation before one of the next.
_NEW_CONTAINERS, _LOOKS = 50_000, 20
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def configure_logging(log_format: Literal["json", "text"], *, verbose: bool) -> None:
    """Log to standard error. Only warnings of kopf are logged, unless verbose."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("fastgen_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)


def raise_open_files_limit() -> int:
    """Raise the soft limit on open files to the hard limit, at most to 65,536, and return it.

    An infinite limit is returned as 65,536. Container runtimes often start with 1024. Each connection to a replica that
    is kept for the next scrape is an open file.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Infinity is -1.
    wanted = _MOST_FILES if highest == resource.RLIM_INFINITY else min(_MOST_FILES, highest)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return _MOST_FILES if limit == resource.RLIM_INFINITY else limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
    return wanted


def collect_garbage_less_often() -> None:
    """Look for cyclic garbage after 50,000 new dictionaries and lists, less often than by default.

    A list of 500 pods has 100,000 of them, none of which is garbage: with Python's default, looking for cycles takes
    longer than parsing. Objects without cycles are freed at once, whatever the setting.
    """
    gc.set_threshold(_NEW_CONTAINERS, _LOOKS, _LOOKS)


def hold_stop_signals() -> None:
    """Block SIGINT and SIGTERM until `stop_on_signals`. Call it before other threads start: they inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def stop_on_signals(stop: Callable[[], object]) -> None:
    """Call `stop` in the running event loop after SIGINT or SIGTERM, also after one that is already pending.

    A thread waits for the signals, because kopf replaces their handlers whenever it starts, and ends only itself.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        signal.sigwait(_STOP_SIGNALS)
        loop.call_soon_threadsafe(stop)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def end_generators_silently(loop: asyncio.AbstractEventLoop) -> None:
    """Do not report generators that fail when the loop's end closes them.

    kopf leaves the generators of its watches open, one inside another. asyncio closes them all at once, and one that
    waits for another raises `RuntimeError`: a traceback in the log of an orderly stop.
    """

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "asyncgen" not in context:
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
