"""The ranks of a divided model as threads of one process: the real group, ring and runners, started in milliseconds."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fastgen.model.source import ModelSource
from fastgen.runner.ranks.gloo import GlooGroup
from fastgen.runner.ranks.loading import load_follower, load_leader
from fastgen.runner.ranks.ring import Ring, RingFiles
from fastgen.settings import EngineConfig
from support.waiting import HANG_SECONDS, eventually


class Unwatched:
    """The watch of rank 0 over threads, which do not die alone: a thread that fails closes its connections."""

    def check(self) -> None:
        """Find nothing."""

    def guard(self) -> AbstractContextManager[None]:
        """Guard nothing."""
        return nullcontext()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; its parent may not have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for_the_end(pids: Iterable[int]) -> None:
    """Wait until processes have ended."""
    eventually(lambda: all(map(has_ended, pids)), within=120, what="the end of all processes")


@contextmanager
def ranked(folder: Path, size: int, **settings: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Load the model at `folder` on `size` ranks; yield the runner of rank 0, and those of the others."""
    config = EngineConfig(model=str(folder), tensor_parallel=size, **settings)
    files = RingFiles.create(size - 1)
    ring, followers = Ring(files), list[Any]()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"

        def follow(rank: int) -> None:
            runner = load_follower(ModelSource.open(str(folder)), config, GlooGroup(store, rank, size), ring)
            followers.append(runner)
            runner.follow()

        threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        group, source = GlooGroup(store, 0, size), ModelSource.open(str(folder))
        runner = load_leader(source, config, lambda _stage, _fraction: None, group, ring, Unwatched())
        yield runner, followers
        runner.end()
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), "a rank does not end"
    files.close()
