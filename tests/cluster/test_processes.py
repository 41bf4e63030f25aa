"""Programs in the background, and the finding of them by a later run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.processes import Processes, command_line
from cluster.waiting import wait_for

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); time.sleep(600)"
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    for name in processes.names():
        processes.stop(name, patience=0)


def start(processes: Processes, program: str) -> int:
    processes.start("it", [sys.executable, "-c", program, str(processes.folder)])
    pid = processes.pid("it")
    assert pid is not None
    return pid


def test_a_second_start_is_harmless(processes: Processes) -> None:
    assert start(processes, SLEEP) == start(processes, SLEEP)


def test_a_later_run_finds_and_stops_it(processes: Processes) -> None:
    pid = start(processes, SLEEP)
    later = Processes(processes.folder)
    wait_for("its command line is there", lambda: later.pid("it") == pid, seconds=10)
    later.stop("it", patience=10)
    assert command_line(pid) == []
    assert later.names() == []


def test_one_that_ignores_the_request_is_killed(processes: Processes) -> None:
    pid = start(processes, STUBBORN)
    wait_for("it ignores SIGTERM", lambda: "set" in processes.log("it").read_text(), seconds=10)
    processes.stop("it", patience=0.1)
    assert command_line(pid) == []


def test_a_stale_id_of_another_program_is_left_alone(processes: Processes) -> None:
    (processes.folder / "pids").mkdir()
    (processes.folder / "pids" / "it").write_text(str(os.getppid()))
    assert processes.pid("it") is None
    processes.stop("it", patience=0)
    assert command_line(os.getppid()) != []
    assert processes.names() == []


def test_one_that_ends_by_itself_is_told_with_its_last_words(processes: Processes) -> None:
    start(processes, "raise SystemExit('no port is free')")
    wait_for("it has ended", lambda: processes.pid("it") is None, seconds=10)
    with pytest.raises(RuntimeError, match="no port is free"):
        processes.check()


def test_a_program_that_could_not_be_found_again_is_not_started(processes: Processes) -> None:
    with pytest.raises(ValueError, match="no argument names"):
        processes.start("it", [sys.executable, "-c", SLEEP])
