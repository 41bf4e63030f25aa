"""Background programs, and how a later run finds them."""

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


def test_a_second_start_does_nothing(processes: Processes) -> None:
    assert start(processes, SLEEP) == start(processes, SLEEP)


def test_a_later_run_finds_and_stops_it(processes: Processes) -> None:
    pid = start(processes, SLEEP)
    later = Processes(processes.folder)
    wait_for("the command line of the process", lambda: later.pid("it") == pid, seconds=60)
    later.stop("it", patience=60)
    assert command_line(pid) == []
    assert later.names() == []


def test_a_program_that_ignores_sigterm_is_killed(processes: Processes) -> None:
    pid = start(processes, STUBBORN)
    wait_for("the program to ignore SIGTERM", lambda: "set" in processes.log("it").read_text(), seconds=60)
    processes.stop("it", patience=0.1)
    assert command_line(pid) == []


def test_a_reused_process_id_is_not_touched(processes: Processes) -> None:
    (processes.folder / "pids").mkdir()
    (processes.folder / "pids" / "it").write_text(str(os.getppid()))
    assert processes.pid("it") is None
    processes.stop("it", patience=0)
    assert command_line(os.getppid()) != []
    assert processes.names() == []


def test_a_program_that_exited_is_reported_with_the_end_of_its_log(processes: Processes) -> None:
    processes.start("it", [sys.executable, "-c", "raise SystemExit('no port is free')", str(processes.folder)])
    wait_for("the program to exit", lambda: processes.pid("it") is None, seconds=60)
    with pytest.raises(RuntimeError, match="no port is free"):
        processes.check()


def test_a_program_without_the_folder_in_its_arguments_is_rejected(processes: Processes) -> None:
    with pytest.raises(ValueError, match="no argument names"):
        processes.start("it", [sys.executable, "-c", SLEEP])
