"""The process from which tests fork programs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.forking import ForkServer
from support.waiting import PATIENCE, eventually

PROGRAM = """
import time

def main(arguments):
    time.sleep(float(arguments[1]))
    return int(arguments[0])
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "exits_with.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer("exits_with")
    yield server
    server.close()


def test_all_threads_that_wait_for_a_process_get_its_exit_status(server: ForkServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for status in range(20):
            process = server.start([str(status), "0"], tmp_path / "log")
            assert {each.result() for each in [pool.submit(process.wait, PATIENCE * 10) for _ in range(8)]} == {status}


def test_the_end_of_the_process_that_forks_is_named(server: ForkServer, tmp_path: Path) -> None:
    assert server.start(["3", "0"], tmp_path / "log").wait(PATIENCE * 10) == 3
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="forks exits_with ended with -9"):
            server.start(["0", "0"], tmp_path / "log")


def test_processes_end_with_the_process_that_forks(server: ForkServer, tmp_path: Path) -> None:
    process = server.start(["0", "600"], tmp_path / "log")
    assert process.poll() is None
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: is_gone(process.pid), within=10, what="its end")


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; nobody may have asked for its status."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
