"""Starts the engine process early: importing torch takes seconds, and the server does its own start meanwhile.

The process reads its configuration from standard input. Messages go over a socket in a private directory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fastgen.config import EngineConfig

# Command of the engine process, without its arguments: socket address and log format.
WORKER = (sys.executable, "-m", "fastgen.engine.process")

_EXIT_SECONDS = 3.0


class Launch:
    """A started engine process.

    Create it in the main thread: the kernel kills the engine when the thread that started it ends.

    Attributes:
        process: the engine process.
        address: socket address that the engine connects to and the server binds.
    """

    def __init__(self, log_format: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-")
        self.address = f"ipc://{Path(self._directory.name) / 'engine'}"
        self.process = subprocess.Popen([*WORKER, self.address, log_format], stdin=subprocess.PIPE)

    def hand_over(self, config: EngineConfig) -> None:
        """Send the configuration. If the engine has exited already, `EngineClient` detects that."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(config))
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        """Kill the process if it still runs, and remove the directory. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a broken device, in the kernel
            self.process.wait(_EXIT_SECONDS)
        self._directory.cleanup()
