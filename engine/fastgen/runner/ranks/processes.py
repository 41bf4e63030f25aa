"""Starts, watches and ends the processes of all ranks but the first."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fastgen import exit_codes, logs
from fastgen.link.messages import Failed
from fastgen.link.silence import Silence, is_stopped
from fastgen.link.watchdog import ProcessorWait
from fastgen.model.device_errors import is_device_failure
from fastgen.runner.failures import GroupBroken, RankFailed, describe
from fastgen.runner.ranks.ring import Ring, RingFiles
from fastgen.settings import EngineConfig

if TYPE_CHECKING:
    from fastgen.runner.ranks.gloo import GlooGroup

log = logging.getLogger("fastgen.model")

_COMMAND = (sys.executable, "-m", "fastgen.runner.ranks.process")
# Exit code of a rank that ends only because another one has ended.
LEFT_ALONE = 70

_LOOK_SECONDS = 0.25
# How long to wait, after a connection broke, for the end of the process that broke it. Time in which processes wait for
# a processor counts less.
_CAUSE_SECONDS = 2.0
# How long to wait for killed processes: one that waits for a broken device may not end.
_EXIT_SECONDS = 3.0


class Assignment(msgspec.Struct, frozen=True):
    """What the process of a rank gets on its standard input.

    Attributes:
        rank: its number.
        parent: process of rank 0, with which it ends.
        config: the engine's settings.
        memory, wakes: as `RingFiles`, which it inherits.
        folder: where the ranks meet, and where it writes the error that ends it.
        log_format: of its log lines.
    """

    rank: int
    parent: int
    config: EngineConfig
    memory: int
    wakes: tuple[int, ...]
    folder: str
    log_format: str

    @property
    def store(self) -> Path:
        """The file by which the ranks find each other."""
        return Path(self.folder) / "store"

    @property
    def failure(self) -> Path:
        """The file with the error that ended the rank."""
        return Path(self.folder) / f"rank-{self.rank}"


class RankProcesses:
    """The processes of ranks 1 and higher, for rank 0.

    A thread starts and watches them. The first that ends or hangs ends all others, and is named. The kernel kills them
    when this process ends.

    Args:
        config: the engine's settings.

    Attributes:
        ring: carries the steps.
        pids: of ranks 1 and higher.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._size = config.tensor_parallel
        self._directory = tempfile.TemporaryDirectory(prefix="fastgen-ranks-", ignore_cleanup_errors=True)
        self._files = files = RingFiles.create(self._size - 1)
        self.ring = Ring(files)
        self._assignments = [
            Assignment(
                rank, os.getpid(), config, files.memory, files.wakes, self._directory.name, logs.current_format()
            )
            for rank in range(1, self._size)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failure: RankFailed | None = None
        self._beats_count = False
        self._broken: Exception | None = None
        self._group: GlooGroup | None = None
        self._ended = threading.Event()
        self._failed = threading.Event()
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="ranks", daemon=True).start()
        started.result()
        self.pids = [process.pid for process in self._processes]

    def join(self) -> GlooGroup:
        """Wait for the processes, and return the group.

        Raises:
            RankFailed: if one has ended or is stopped.
        """
        while not self.ring.beats.all():
            self.check()
            time.sleep(_LOOK_SECONDS / 5)
        from fastgen.runner.ranks.joining import join_group  # late, because it imports torch

        joined: Future[GlooGroup] = Future()

        def join() -> None:
            try:
                joined.set_result(join_group(self._assignments[0].store, 0, self._config))
            except BaseException as error:
                joined.set_exception(error)

        # In a thread, because joining cannot be interrupted when a rank ends.
        threading.Thread(target=join, name="join", daemon=True).start()
        while not joined.done():
            self.check()
            wait((joined,), _LOOK_SECONDS / 5)
        self._group = joined.result()
        return self._group

    def count_beats(self) -> None:
        """From now on, a rank also fails if its process shows no sign of life; before, only if a signal has stopped it.

        While it loads, one call may take seconds.
        """
        self._beats_count = True

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context for work with the other ranks: an error in it ends them.

        Raises:
            RankFailed: naming the rank that failed, which may be this one.
        """
        self.check()
        try:
            yield
        except GroupBroken as error:
            raise self._cause(error) from None
        except RankFailed:
            raise
        except Exception as error:
            if is_device_failure(error):  # maybe because another rank has ended
                raise self._cause(error) from error
            log.exception("rank 0 failed")
            raise self.end(RankFailed.of(0, describe(error))) from error
        except BaseException:
            self.end()
            raise

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context for loading: an error of this rank ends the others and stays as it is.

        Raises:
            RankFailed: if another rank fails.
        """
        try:
            yield
        except GroupBroken as error:
            raise self._cause(error) from None
        except BaseException:
            self.end()
            raise

    def end(self, failure: RankFailed | None = None) -> RankFailed:
        """Kill the processes. Return the failure, which `check` raises from now on. Idempotent.

        Args:
            failure: why, if no rank has failed before.
        """
        if self._failure is None:
            self._failure = failure or RankFailed(Failed("the ranks of the model have ended", exit_codes.FAILED))
        self._failed.set()
        if not self._ended.is_set():
            self._ended.set()
            self._kill()
            self._abort()
            deadline = time.monotonic() + _EXIT_SECONDS
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            self._files.close()
            self._directory.cleanup()
        return self._failure

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _abort(self) -> None:
        """End what this process waits for on its GPU, in a thread, because that may wait as well."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="abort", daemon=True).start()

    def _cause(self, broken: Exception) -> RankFailed:
        """Return the failure of the rank that broke the group."""
        self._broken = broken
        self._failed.wait()
        return self.end()

    def _run(self, started: Future[None]) -> None:
        """Start the processes, look after them until the first ends or hangs, then kill all.

        Rank 0 may wait for one of them. It is a thread of its own also because the kernel kills a process when the
        thread that started it ends.
        """
        try:
            for assignment in self._assignments:
                self._processes.append(_start(assignment, self._files))
        except BaseException as error:
            self._kill()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            failure = self._watch()
        except Exception as error:  # nothing else looks after them
            log.exception("the ranks cannot be watched")
            failure = RankFailed.of(0, describe(error))
        if failure is not None and not self._ended.is_set():
            self._failure = self._failure or failure
            self._kill()
            self._failed.set()
            self._abort()

    def _watch(self) -> RankFailed | None:
        """Wait for the first failure; return None if the ranks are ended before."""
        waits = [ProcessorWait(process.pid) for process in self._processes]
        silences = [Silence(_LOOK_SECONDS) for _ in waits]
        since_broken, beats = Silence(_LOOK_SECONDS), self.ring.beats.copy()
        while not self._ended.wait(_LOOK_SECONDS):
            now, seen, starved = time.monotonic(), self.ring.beats.copy(), [each.since_last() for each in waits]
            for process, silence, is_same, waited in zip(
                self._processes, silences, seen == beats, starved, strict=True
            ):
                is_silent = is_stopped(process.pid) or (self._beats_count and bool(is_same))
                silence.look(now, is_silent=is_silent, starved=waited)
            beats, broken = seen, self._broken
            since_broken.look(now, is_silent=broken is not None, starved=max(starved))
            failure = self._found(silences)
            if failure is not None:
                return failure
            if broken is not None and (since_broken.seconds > _CAUSE_SECONDS or self._all_left_alone()):
                return RankFailed.of(0, describe(broken))
        return None

    def _found(self, silences: list[Silence]) -> RankFailed | None:
        """Return the failure of a rank that has ended for a reason of its own, or that hangs."""
        codes = [process.poll() for process in self._processes]
        for assignment, code, silence in zip(self._assignments, codes, silences, strict=True):
            if code is not None and code != LEFT_ALONE:
                return RankFailed.of(assignment.rank, _reason(assignment, code))
            if code is None and silence.is_hung:
                return RankFailed.of(assignment.rank, silence.failure())
        return None

    def _all_left_alone(self) -> bool:
        return all(process.poll() == LEFT_ALONE for process in self._processes)


def _start(assignment: Assignment, files: RingFiles) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, pass_fds=files.numbers)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which is detected later
        process.stdin.write(msgspec.json.encode(assignment))
        process.stdin.close()
    return process


def _reason(assignment: Assignment, code: int) -> Failed:
    """Return why a process has ended: its own words, or its exit code."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(assignment.failure.read_bytes(), type=Failed)
    return Failed(f"its process {exit_codes.how_ended(code)}", exit_codes.FAILED)
