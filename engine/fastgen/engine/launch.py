"""Start the engine process early.

Importing torch takes seconds, and the server starts up meanwhile. The process reads its configuration from standard
input. Messages go over a socket in a private directory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fastgen.config import EngineConfig

# Command of the engine process, without its arguments: log format, and a socket address per client.
WORKER = (sys.executable, "-m", "fastgen.engine.process")

_EXIT_SECONDS = 3.0


class EngineProcess(Protocol):
    """A client's handle to the engine process."""

    @property
    def address(self) -> str:
        """Socket address that the engine connects to and the client binds."""

    @property
    def pid(self) -> int:
        """The process's number."""

    @property
    def is_owned(self) -> bool:
        """Whether this process started the engine, and ends it."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, or if only its parent can know it."""

    def hand_over(self, config: EngineConfig) -> None:
        """Send the configuration, if this process started the engine."""

    def kill(self) -> None:
        """Kill the process, if this process started it."""

    def end(self) -> None:
        """Kill the process and clean up, if this process started it."""


class Launch:
    """A started engine process.

    Create it in the main thread: the kernel kills the engine when the thread that started it ends.

    Args:
        log_format: of the process's log lines.
        num_clients: API processes that will use the engine, this one included.

    Attributes:
        address: socket address that the engine connects to and this process, client 0, binds.
    """

    is_owned = True

    def __init__(self, log_format: str, num_clients: int = 1) -> None:
        # The other API processes may write to it while it is removed; the last call of `end` succeeds.
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-", ignore_cleanup_errors=True)
        self.folder = Path(self._directory.name)
        addresses = [self._address(client) for client in range(num_clients)]
        self.address = addresses[0]
        self._process = subprocess.Popen([*WORKER, log_format, *addresses], stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def shared(self, client: int) -> SharedEngine:
        """Return the engine as another client sees it. Call it in that client's process, a fork of this one."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the engine reads its configuration until all copies are closed
        return SharedEngine(self._address(client), self.pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def hand_over(self, config: EngineConfig) -> None:
        """Send the configuration. If the engine has exited already, `EngineClient` detects that."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(config))
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        """Kill the process if it still runs, and remove the directory. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a broken device, in the kernel
            self._process.wait(_EXIT_SECONDS)
        self._directory.cleanup()

    def _address(self, client: int) -> str:
        return f"ipc://{self.folder / f'engine-{client}'}"


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """An engine process that another process started, configures and ends."""

    address: str
    pid: int
    is_owned = False

    def poll(self) -> int | None:
        """Return None: only the parent learns the exit code."""
        return None

    def hand_over(self, config: EngineConfig) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""
