"""Measures in a server how long its event loop is held between two of its turns, by whatever the server does.

On a busy machine the elapsed time says little. So the time is the smaller of two, neither of which grows with the work
of other processes: the processor time of the server's threads, and the elapsed time without that in which the event
loop's thread could run but had no core. Threads that encode texts do not count in the first: they do not hold the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

import fastgen.server.api_process
import fastgen.server.main
from fastgen.link.watchdog import seconds_waited

_FORMAT = "<d"


def install(path: Path) -> None:
    """Make the servers of this process write to `path` the longest time so far since the file was removed."""

    class Probed(fastgen.server.api_process.APIProcess):
        async def run(self) -> int:
            probing = asyncio.create_task(_probe(path))
            try:
                return await super().run()
            finally:
                probing.cancel()

    fastgen.server.main.APIProcess = Probed  # type: ignore[misc]


def longest_hold(path: Path) -> float:
    """Return the longest time that the event loop was held since the last call, in seconds."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0.0
    path.unlink()
    return float(struct.unpack(_FORMAT, content)[0])


class _Times(NamedTuple):
    elapsed: float
    computed: float
    waited: float

    @classmethod
    def now(cls) -> _Times:
        encoding = sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name.startswith("encode") and thread.ident is not None
        )
        waited = seconds_waited(Path("/proc/thread-self"))
        return cls(time.monotonic(), time.process_time() - encoding, waited)

    def held(self, last: _Times) -> float:
        return min(self.computed - last.computed, self.elapsed - last.elapsed - (self.waited - last.waited))


async def _probe(path: Path) -> None:
    longest, last = 0.0, _Times.now()
    while True:
        await asyncio.sleep(0.002)
        now = _Times.now()
        if not path.exists():
            longest = 0.0
        if now.held(last) > longest:
            longest = now.held(last)
            new = path.with_suffix(".new")
            new.write_bytes(struct.pack(_FORMAT, longest))
            new.rename(path)
        last = now
