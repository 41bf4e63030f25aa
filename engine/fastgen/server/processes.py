"""The API processes of a server besides the first one.

The first one starts them, passes signals on and waits for them. They are forked before an event loop runs, so they
share the memory of imported modules. If one ends by itself, the whole server drains and exits, and its container
restarts: the failure is visible, and all counters restart together.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

from fastgen import exit_codes
from fastgen.link.client import EngineError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class APIProcessError(EngineError):
    """An API process other than the first ended by itself, so the server ends too. The message is one line."""

    @classmethod
    def of(cls, process: int, code: int) -> APIProcessError:
        """Return the error of a process with an exit code, negative for a signal."""
        return cls(f"API process {process} {exit_codes.how_ended(code)}", code if code > 0 else exit_codes.FAILED)


class APIProcesses:
    """The API processes of a server except the first, which has number 0.

    Args:
        count: number of processes to start.
        serve: called in each of them with its number, from 1; returns its exit code.
    """

    def __init__(self, count: int, serve: Callable[[int], int]) -> None:
        self._running: dict[int, int] = {}  # number by pid
        for number in range(1, count + 1):
            self._running[_fork(number, serve)] = number

    @property
    def num_running(self) -> int:
        """Number of processes that are not known to have exited."""
        return len(self._running)

    async def wait_exit(self) -> tuple[int, int]:
        """Wait until a process exits; return its number and exit code, negative for a signal."""
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        descriptors = [os.pidfd_open(pid) for pid in self._running]
        for descriptor in descriptors:
            loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        pid, status = next(found for pid in self._running if (found := os.waitpid(pid, os.WNOHANG))[0])
        return self._running.pop(pid), os.waitstatus_to_exitcode(status)

    def signal(self, number: int) -> None:
        """Send a signal to all processes that have not exited."""
        for pid in self._running:
            os.kill(pid, number)


def _fork(number: int, serve: Callable[[int], int]) -> int:
    """Run `serve(number)` in a new process; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() == parent:
            code = serve(number)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the cleanup of what the first process has set up
