"""Starts the engine process before its configuration is known, because importing torch takes seconds.

The process reads its configuration from standard input. Messages go over a socket in a private directory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fastgen.settings import EngineConfig

# Command of the engine process, without its arguments: log format, and a socket address per client.
WORKER = (sys.executable, "-m", "fastgen.engine.process")

_EXIT_SECONDS = 3.0


class EngineProcess:
    """A client's handle to the engine process.

    With this base class, another process started the engine and ends it.

    Attributes:
        address: socket address that the engine connects to and the client binds.
        pid: number of the engine process.
        is_owned: whether this process started the engine, and ends it.
    """

    is_owned = False

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, or if only its parent can know it."""
        return None

    def hand_over(self, config: EngineConfig) -> None:
        """Send the configuration, if this process started the engine."""

    def kill(self) -> None:
        """Kill the process, if this process started it."""

    def end(self) -> None:
        """Kill the process and clean up, if this process started it."""


class Launch(EngineProcess):
    """Starts the engine process, and ends it.

    Create it in the main thread: the kernel kills the engine when the thread that started it ends.

    Args:
        log_format: of the process's log lines.
        num_clients: API processes that will use the engine. This one is client 0.
    """

    is_owned = True

    def __init__(self, log_format: str, num_clients: int = 1) -> None:
        # The other API processes may write to it while it is removed; the last call of `end` succeeds.
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-", ignore_cleanup_errors=True)
        self.folder = Path(self._directory.name)
        self._addresses = [f"ipc://{self.folder / f'engine-{client}'}" for client in range(num_clients)]
        self._process = subprocess.Popen([*WORKER, log_format, *self._addresses], stdin=subprocess.PIPE)
        super().__init__(self._addresses[0], self._process.pid)

    def shared(self, client: int) -> EngineProcess:
        """Return another client's handle. Call it in that client's process, a fork of this one."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the engine reads its configuration until all copies are closed
        return EngineProcess(self._addresses[client], self.pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def hand_over(self, config: EngineConfig) -> None:
        """Send the configuration. If the engine has exited already, `EngineClient` detects that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(config))
            self._process.stdin.close()

    def end(self) -> None:
        """Kill the process if it still runs, and remove the directory. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a broken device, in the kernel
            self._process.wait(_EXIT_SECONDS)
        self._directory.cleanup()
