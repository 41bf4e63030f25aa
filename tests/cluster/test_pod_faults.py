"""Faults of one pod's engine act on its container's cgroup and processes, in both versions of cgroups."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster import pod_faults
from support.waiting import PATIENCE, eventually

POD: dict[str, Any] = {
    "metadata": {"name": "chat-x", "uid": "uid-1"},
    "status": {
        "containerStatuses": [
            {"name": "other", "containerID": "containerd://bbb"},
            {"name": "engine", "containerID": "containerd://aaa"},
        ]
    },
}


@pytest.fixture(params=["", "burstable"])
def container(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the engine's container; a second hierarchy has no files of the CPU."""
    service: str = request.param
    tops = [tmp_path / "pids", tmp_path / "cpu"]
    folders = [top / service / "poduid-1" / "aaa" for top in tops]
    for folder in (*folders, folders[1].parent / "bbb"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(pod_faults, "pod_cgroups", lambda: tops)
    return folders[1]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    sleeping = subprocess.Popen(["sleep", "600"])
    command = Path(f"/proc/{sleeping.pid}/cmdline")
    eventually(command.read_bytes, within=5, what="the program", every=0.01)  # empty until its memory is set up
    yield sleeping
    sleeping.kill()
    sleeping.wait()


def test_the_cpu_of_the_container_is_limited_in_cgroups_of_version_2(container: Path) -> None:
    (container / "cpu.max").write_text("max 100000")
    pod_faults.limit_cpus(POD, 0.3)
    assert (container / "cpu.max").read_text() == "6000 20000"


def test_the_cpu_of_the_container_is_limited_in_cgroups_of_version_1(container: Path) -> None:
    (container / "cpu.cfs_quota_us").write_text("-1")
    pod_faults.limit_cpus(POD, 0.3)
    assert (container / "cpu.cfs_period_us").read_text() == "20000"
    assert (container / "cpu.cfs_quota_us").read_text() == "6000"


@pytest.mark.usefixtures("container")
def test_a_container_without_a_cgroup_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="chat-x"):
        pod_faults.limit_cpus(POD, 0.3)


def test_the_next_pod_that_runs_a_program_is_stopped(container: Path, process: subprocess.Popen[bytes]) -> None:
    (container / "cgroup.procs").write_text(f"{process.pid}\n")
    with pytest.raises(RuntimeError, match="no new pod"):
        pod_faults.stop_next("sleep 600", seconds=0.1)
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(pod_faults.stop_next, "sleep 600", PATIENCE * 10)
        made: list[str] = []
        while not watch.done():  # the watch ignores the pods from before it begins, whenever that is
            made.append(f"uid-{len(made) + 2}")
            new = container.parents[1] / f"pod{made[-1]}" / "ccc"
            new.mkdir(parents=True)
            (new / "cgroup.procs").write_text(f"{process.pid}\n")
            time.sleep(0.2)
        assert watch.result() in made

    def is_stopped() -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    eventually(is_stopped, within=5, what="the stop", every=0.01)


def test_a_paused_program_goes_on_at_the_end(container: Path, process: subprocess.Popen[bytes]) -> None:
    (container / "cgroup.procs").write_text(f"{process.pid}\n")
    status = Path(f"/proc/{process.pid}/status")
    with pod_faults.paused(POD, "sleep"):
        eventually(lambda: "stopped" in status.read_text(), within=5, what="the pause")
    eventually(lambda: "stopped" not in status.read_text(), within=5, what="its end")
    with pytest.raises(RuntimeError, match="no process runs other"), pod_faults.paused(POD, "other"):
        pass


def test_a_program_of_a_pod_is_killed(container: Path, process: subprocess.Popen[bytes]) -> None:
    (container / "cgroup.procs").write_text(f"{process.pid}\n")
    with pytest.raises(RuntimeError, match="no process runs other"):
        pod_faults.kill(POD, "other")
    pod_faults.kill(POD, "sleep")
    assert process.wait(PATIENCE * 5) == -signal.SIGKILL
