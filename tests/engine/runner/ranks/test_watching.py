"""Whatever happens to a rank, in whatever phase, ends the whole group and names the rank.

The ranks are processes without a model. `test_processes.py` has real ones.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import support
from fastgen import exit_codes
from fastgen.link.messages import Failed
from fastgen.link.silence import Silence
from fastgen.runner.failures import GroupBroken, RankFailed
from fastgen.runner.ranks import gloo, processes
from fastgen.runner.ranks.processes import LEFT_ALONE, Assignment, RankProcesses
from fastgen.settings import EngineConfig
from support.ranks import has_ended, wait_for_the_end
from support.scripted_rank import FAULTS, joined
from support.waiting import eventually

pytestmark = [pytest.mark.slow]

SIZE = 3
CONFIG = EngineConfig(model="none", tensor_parallel=SIZE)
# How a rank that ends by a fault is described, and the exit code.
OUTCOMES = {
    "kill": (r"its process was killed by SIGKILL \(out of memory\?\)", exit_codes.FAILED),
    "stop": (r"its process has not run for [34] s; look for stopped processes on the node", exit_codes.HUNG),
    "exit": ("its process ended with exit code 9", exit_codes.FAILED),
    "error": ("KeyError: 'a mistake'", exit_codes.FAILED),
    "memory": ("out of memory: no room; lower --memory-percent or --token-budget", exit_codes.FAILED),
}
LONG_SECONDS = 120.0


class FakeGroup:
    """Waits for the other ranks as the real one does: nothing but their arrival ends it."""

    def __init__(self, store: Path, _rank: int, size: int) -> None:
        while not all(joined(store.parent, rank).exists() for rank in range(1, size)):
            time.sleep(0.01)
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "GlooGroup", FakeGroup)
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-m", "support.scripted_rank"))
    monkeypatch.setenv("PYTHONPATH", str(Path(support.__file__ or "").parents[1]))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count as hung only a rank that is stopped for a minute: a busy machine may stop a healthy one for seconds."""
    monkeypatch.setattr("fastgen.link.silence.HUNG_SECONDS", 60.0)


def wait_for_connections(ranks: RankProcesses) -> None:
    """Wait as an operation of the group does: until a process has ended, which closes its connections."""
    while not any(map(has_ended, ranks.pids)):
        time.sleep(0.01)
    raise GroupBroken("Connection closed by peer")


def serve(ranks: RankProcesses, num_steps: int) -> None:
    """Start, load and run steps as rank 0 does; the other ranks are idle in the end."""
    with ranks.loading():
        ranks.join()
        if os.environ["SCRIPT"].split(":")[1] == "loading":
            wait_for_connections(ranks)
    ranks.count_beats()
    for _ in range(num_steps):
        with ranks.guard():
            ranks.ring.publish(np.zeros(1000, np.int32), ranks.check)
    with ranks.guard():
        wait_for_connections(ranks)


PHASES = ("starting", "joining", "loading", "step")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_phase_ends_all_ranks_and_names_the_one(
    monkeypatch: pytest.MonkeyPatch, fault: str, phase: str
) -> None:
    rng = random.Random(f"{fault} {phase}")
    rank, (words, code) = rng.randint(1, SIZE - 1), OUTCOMES[fault]
    monkeypatch.setenv("SCRIPT", f"{rank}:{phase}:{fault}")
    if fault != "stop":
        monkeypatch.setattr("fastgen.link.silence.HUNG_SECONDS", 60.0)
    ranks = RankProcesses(CONFIG)
    with pytest.raises(RankFailed, match=f"^rank {rank}: {words}") as failure:
        serve(ranks, rng.randint(1, 2000))  # they fill the ring, or not
    assert failure.value.failed.exit_code == code
    wait_for_the_end(ranks.pids)
    with pytest.raises(RankFailed, match=f"^rank {rank}: "):  # from now on
        ranks.check()
    ranks.end()


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    monkeypatch.setenv("SCRIPT", "0::")
    ranks = RankProcesses(CONFIG)
    with ranks.loading():
        ranks.join()
    ranks.count_beats()
    yield ranks
    ranks.end()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fault_while_nothing_runs_is_found(healthy: RankProcesses, fault: signal.Signals) -> None:
    group = cast("FakeGroup", healthy._group)
    os.kill(healthy.pids[1], fault)
    found = eventually(lambda: healthy._failure, within=LONG_SECONDS, what="the failure")
    assert str(found).startswith("rank 2: ")
    wait_for_the_end(healthy.pids)
    assert group.is_aborted.wait(LONG_SECONDS), "rank 0 may wait on its GPU for the rank that has ended"


@pytest.mark.usefixtures("patient")
def test_an_error_of_rank_0s_gpu_is_that_of_the_rank_that_caused_it(healthy: RankProcesses) -> None:
    """Reading the memory of a GPU whose process has ended is an error, too."""
    os.kill(healthy.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"^rank 2: its process was killed by SIGKILL"), guarded(healthy):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def guarded(ranks: RankProcesses) -> AbstractContextManager[None]:
    """Return the context of a step that began before a failure was found."""
    ranks.check = lambda: None  # type: ignore[method-assign]
    return ranks.guard()


@pytest.mark.usefixtures("patient")
def test_an_error_of_rank_0s_gpu_without_another_cause_is_its_own(healthy: RankProcesses) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0: the GPU failed: CUDA error") as failure, healthy.guard():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert failure.value.failed.exit_code == exit_codes.DEVICE_FAILED


@pytest.mark.usefixtures("patient")
def test_stopped_ranks_end_when_the_group_is_ended(healthy: RankProcesses) -> None:
    group = cast("FakeGroup", healthy._group)
    for pid in healthy.pids:
        os.kill(pid, signal.SIGSTOP)
    assert str(healthy.end()) == "the ranks of the model have ended"
    assert group.is_aborted.wait(LONG_SECONDS), "this process may wait on its GPU for them"
    wait_for_the_end(healthy.pids)
    assert all(map(has_ended, healthy.pids))


@pytest.mark.usefixtures("patient")
def test_a_process_that_cannot_be_killed_does_not_block_the_end(
    healthy: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits in the kernel for a broken disk."""

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "it may never end"
        raise subprocess.TimeoutExpired("rank 1", timeout)

    monkeypatch.setattr(healthy._processes[0], "wait", wait)
    assert str(healthy.end()) == "the ranks of the model have ended"
    wait_for_the_end(healthy.pids[1:])


@pytest.mark.usefixtures("patient")
def test_the_ranks_outlive_the_thread_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "0::")
    made: list[RankProcesses] = []
    starting = threading.Thread(target=lambda: made.append(RankProcesses(CONFIG)))
    starting.start()
    starting.join()
    (ranks,) = made
    ranks.join()  # they still run
    ranks.check()
    assert not any(map(has_ended, ranks.pids))
    ranks.end()


@pytest.mark.usefixtures("patient")
def test_an_error_of_the_watching_thread_ends_all(healthy: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    def confused(_silences: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(healthy, "_found", confused)
    found = eventually(lambda: healthy._failure, within=LONG_SECONDS, what="the failure")
    assert str(found) == "rank 0: ValueError: a mistake"
    wait_for_the_end(healthy.pids)


PARENT = """
import sys, time
from fastgen.runner.ranks import processes
from fastgen.settings import EngineConfig
processes._COMMAND = (sys.executable, "-m", "support.scripted_rank")
ranks = processes.RankProcesses(EngineConfig(model="none", tensor_parallel=3))
if sys.argv[1] == "loaded":
    while not ranks.ring.beats.all():
        time.sleep(0.01)
print(*ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["starting", "loaded"])
def test_the_ranks_end_with_a_killed_parent(moment: str) -> None:
    command = [sys.executable, "-c", PARENT, moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_for_the_end(pids)


def test_a_rank_whose_parent_ended_before_it_could_ask_the_kernel_ends() -> None:
    """Its parent is now another process."""
    orphan = Assignment(1, os.getpid() + 1, CONFIG, 0, (), "", "text")
    command = (sys.executable, "-m", "fastgen.runner.ranks.process")
    ended = subprocess.run(command, input=msgspec.json.encode(orphan), timeout=LONG_SECONDS, check=False)
    assert ended.returncode == LEFT_ALONE


def ended_with(*codes: int | None) -> RankProcesses:
    """Return ranks whose processes have these exit codes; None is that of one which runs."""
    ranks = object.__new__(RankProcesses)
    ranks._assignments = [Assignment(rank, 0, CONFIG, 0, (), "", "text") for rank, _ in enumerate(codes, 1)]
    ranks._processes = [cast(Any, SimpleNamespace(poll=lambda code=code: code)) for code in codes]
    return ranks


def silences(*seconds: float) -> list[Silence]:
    made = [Silence(10.0) for _ in seconds]
    for silence, length in zip(made, seconds, strict=True):
        silence.look(0.0, is_silent=False, starved=0.0)
        silence.look(length, is_silent=True, starved=0.0)
    return made


def test_a_rank_that_ended_because_another_had_is_not_named() -> None:
    failure = ended_with(LEFT_ALONE, -9)._found(silences(0, 0))
    assert str(failure).startswith("rank 2: its process was killed by SIGKILL")
    alone = ended_with(LEFT_ALONE)
    assert alone._found(silences(0)) is None
    assert alone._all_left_alone()
    assert not ended_with(LEFT_ALONE, None)._all_left_alone()


def test_a_rank_that_hangs_is_named_with_the_age_of_its_last_sign_of_life() -> None:
    ranks = ended_with(None, None)
    assert ranks._found(silences(0, 2.9)) is None
    failure = ranks._found(silences(0, 3.1))
    assert failure is not None
    assert failure.failed == Failed(
        "rank 2: its process has not run for 3 s; look for stopped processes on the node", exit_codes.HUNG
    )


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("codes", [(LEFT_ALONE, LEFT_ALONE), (None, None)])
def test_broken_connections_without_a_cause_end_the_group(
    healthy: RankProcesses, monkeypatch: pytest.MonkeyPatch, codes: tuple[int | None, ...]
) -> None:
    """Another rank that reports nothing is not waited for."""
    looked = ended_with(*codes)
    monkeypatch.setattr(healthy, "_found", looked._found)
    monkeypatch.setattr(healthy, "_all_left_alone", looked._all_left_alone)
    with pytest.raises(RankFailed, match=r"^rank 0: GroupBroken: Connection reset by peer"), healthy.guard():
        raise GroupBroken("Connection reset by peer")


@pytest.mark.usefixtures("patient")
def test_waiting_for_a_group_that_never_joins_is_not_left_behind(
    healthy: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Stuck:
        def __init__(self, *_given: object) -> None:
            released.wait()

    monkeypatch.setattr(gloo, "GlooGroup", Stuck)
    os.kill(healthy.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"^rank 1: "):
        healthy.join()
    released.set()
