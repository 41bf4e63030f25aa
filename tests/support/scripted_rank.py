"""The process of a rank without a model and without torch, for tests of the processes that watch it.

`SCRIPT=2:loading:stop` lets rank 2 stop itself while it loads. The phases are `starting`, `joining`, `loading` and
`step`; the faults are those of `FAULTS`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fastgen.runner.ranks import process
from fastgen.runner.ranks.processes import Assignment
from fastgen.runner.ranks.ring import Ring


def _error() -> NoReturn:
    raise KeyError("a mistake")


def _memory() -> NoReturn:
    raise MemoryError("no room")


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(9),
    "error": _error,
    "memory": _memory,
}


def joined(folder: str | Path, rank: int) -> Path:
    """Return the file that a rank writes when it has joined the group."""
    return Path(folder) / f"joined-{rank}"


def follow(assignment: Assignment, ring: Ring) -> None:
    """Go through the phases of a rank, then receive steps forever."""
    rank, phase, fault = os.environ.get("SCRIPT", "0::").split(":")

    def reach(name: str) -> None:
        if (assignment.rank, name) == (int(rank), phase):
            FAULTS[fault]()

    reach("starting")
    process._beat(ring, assignment.rank)
    reach("joining")
    joined(assignment.folder, assignment.rank).touch()
    reach("loading")
    while True:
        ring.receive(assignment.rank - 1)
        reach("step")


if __name__ == "__main__":
    process.follow = follow
    code = process.main()
    os._exit(code)
