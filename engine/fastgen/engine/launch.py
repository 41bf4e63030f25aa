"""Starts the engine process before all else: it imports torch for seconds, and its server does its own part meanwhile.

The process waits for its configuration on standard input. The two talk over a socket in a private folder (`process`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fastgen.config import EngineConfig

# What starts the engine process; the socket's address and the log format are added.
WORKER = (sys.executable, "-m", "fastgen.engine.process")


class Launch:
    """An engine process that has been started.

    To be made in the main thread: the engine is told to end with the thread that started it.

    Attributes:
        process: the engine process.
        address: of the socket that it connects to, for which its server listens sooner or later.
    """

    def __init__(self, log_format: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastgen-")
        self.address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self.process = subprocess.Popen([*WORKER, self.address, log_format], stdin=subprocess.PIPE)

    def hand_over(self, config: EngineConfig) -> None:
        """Tells the engine what to serve. One that has ended already is noticed by who waits for it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(config))
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        """Ends the process if it still runs, and removes the folder. May be called again."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._folder.cleanup()
