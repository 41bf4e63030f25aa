"""Starts many processes of one program quickly: one process imports the program, and each other one is a fork of it.

The programs of this project import for one to two seconds of processor time, which is most of what a short test of a
process takes. That a program starts from its command line is tested elsewhere, once.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Forked:
    """A process of the program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, source: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._source = source

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        with self._lock:  # its parent can ask the kernel for the status only once
            if self.returncode is None:
                self.returncode = self._source.status(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported a module with `main(arguments)` and forks. Ends with this process at the latest."""

    def __init__(self, module: str) -> None:
        path = os.pathsep.join(part for part in sys.path if part)
        self._module = module
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forking", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Forked:
        """Run `main(arguments)` in a new process.

        Args:
            arguments: the command line without the program.
            log: file to which standard output and standard error are appended.
            environment: all variables of the process; this process's if None.
        """
        variables = dict(os.environ if environment is None else environment)
        return Forked(self, self._ask({"arguments": list(arguments), "log": str(log), "environment": variables}))

    def status(self, pid: int) -> int | None:
        """Return the exit status of a process, once; None while it runs."""
        status = self._ask({"pid": pid})
        return None if status == _RUNS else status

    def close(self) -> None:
        """End the process that forks, and those that it has started."""
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=60)

    def _ask(self, order: object) -> int:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended: it answers nothing
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that forks {self._module} ended with {self._process.wait(60)}")
            return int(answer)


@functools.cache
def fork_server(module: str) -> ForkServer:
    """Return the module's fork server that all tests of this process share."""
    server = ForkServer(module)
    atexit.register(server.close)
    return server


_RUNS = 1 << 20  # no exit status


def _serve(main: Callable[[Sequence[str]], int | None]) -> None:
    own = os.getpid()
    for line in sys.stdin:
        order = json.loads(line)
        if "pid" in order:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else _RUNS, flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            # A process that nobody can wait for any more would run beside all later tests.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:  # this process was killed before
                os._exit(1)
            _redirect(Path(order["log"]))
            os.environ.clear()
            os.environ.update(order["environment"])
            sys.exit(main(order["arguments"]))


def _redirect(log: Path) -> None:
    """Write to the log, and read nothing: standard input and output are those of the orders."""
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for path, mode, streams in ((os.devnull, os.O_RDONLY, (0,)), (log, appending, (1, 2))):
        file = os.open(path, mode)
        for stream in streams:
            os.dup2(file, stream)
        os.close(file)


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]).main)
