"""How the first API process supervises the others: if one ends by itself, the server ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from fastgen.server.processes import APIProcessError, APIProcesses

# After another API process ended by itself: time for this one to find the cause, most often that the engine failed.
_FINDING_SECONDS = 5.0


class Supervision:
    """Waits for the other API processes of a server. Only the first process has others to wait for.

    Args:
        others: None in each process but the first.
        on_exit: called with the number of a process that has exited.

    Attributes:
        lost: set after a process has ended by itself.
        loss: the error that names the process; None before.
    """

    def __init__(self, others: APIProcesses | None, on_exit: Callable[[int], None]) -> None:
        self._others = others
        self._on_exit = on_exit
        self._stopping = False
        self.lost = asyncio.Event()
        self.loss: APIProcessError | None = None

    def stop_others(self) -> None:
        """Let the other processes drain; let them end at once if called again."""
        self._stopping = True
        if self._others is not None:
            self._others.signal(signal.SIGTERM)

    async def run(self) -> None:
        """Handle exits until no other process runs."""
        while self._others is not None and self._others.num_running:
            process, code = await self._others.wait_exit()
            self._on_exit(process)
            if self._stopping and code in (0, -signal.SIGTERM):  # it may have had no handler yet
                continue
            error = APIProcessError.of(process, code)
            if code > 0:  # this process is about to find out why, unless the error was the other one's alone
                asyncio.get_running_loop().call_later(_FINDING_SECONDS, self._lose, error)
            else:
                self._lose(error)

    def _lose(self, error: APIProcessError) -> None:
        if self.loss is None:
            self.loss = error
            self.lost.set()
