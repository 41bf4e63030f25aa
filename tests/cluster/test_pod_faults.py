"""Faults of one pod's engine act on its container's cgroup and processes, in both versions of cgroups."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import pod_faults
from support.waiting import eventually

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
    sleeping = subprocess.Popen(["sleep", "60"])
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
    with pytest.raises(RuntimeError, match="chat-x"):
        pod_faults.stop(POD, "sleep")


def test_the_processes_of_a_program_are_stopped_before_the_status_has_its_container(
    container: Path, process: subprocess.Popen[bytes]
) -> None:
    (container / "cgroup.procs").write_text(f"{process.pid}\n")
    pod = {**POD, "status": {}}
    with pytest.raises(RuntimeError, match="chat-x"):
        pod_faults.stop(pod, "pause")
    # The process may not have its command yet.
    eventually(lambda: pod_faults.stop(pod, "sleep") is None, within=5, what="the program", every=0.01)

    def is_stopped() -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    eventually(is_stopped, within=5, what="the stop", every=0.01)
