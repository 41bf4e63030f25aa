"""Slows or stops the engine of one pod from outside, through its cgroups on a native node."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from cluster.traces import pod_cgroups

# Quotas are per period. A short one lets a slow process answer probes in time.
PERIOD_MICROSECONDS = 20_000


def limit_cpus(pod: dict[str, Any], cpus: float) -> None:
    """Let the engine's container use no more than that many CPUs, whatever its pod requests.

    Raises RuntimeError if the container has no cgroup here.
    """
    quota = int(cpus * PERIOD_MICROSECONDS)
    for folder in _folders(pod):
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            return
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            return
    raise RuntimeError(f"pod {pod['metadata']['name']}: its container has no cgroup that limits the CPU")


def stop(pod: dict[str, Any], program: str) -> None:
    """Stop the pod's processes whose command contains `program`, as SIGSTOP does. The kubelet can still kill them.

    It does not need the pod's status, which a busy kubelet writes seconds after the start.

    Raises RuntimeError if there is none.
    """
    uid = pod["metadata"]["uid"]
    stopped: set[int] = set()
    # A process can start others until it is stopped.
    while found := {pid for folder in _containers(uid) for pid in _pids(folder) if _runs(pid, program)} - stopped:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        stopped |= found
    if not stopped:
        raise RuntimeError(f"pod {pod['metadata']['name']}: none of its processes here runs {program}")


def _folders(pod: dict[str, Any]) -> list[Path]:
    """Return the folders of the engine's container, one in each hierarchy; none before the pod's status has its id."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    ids = [status.get("containerID", "").rpartition("/")[2] for status in statuses if status["name"] == "engine"]
    return [folder for folder in _containers(pod["metadata"]["uid"]) if folder.name in ids]


def _containers(uid: str) -> list[Path]:
    """Return the folders of all containers of a pod, in each hierarchy."""
    # The folders between are the classes of service: burstable, besteffort or none.
    return [folder for top in pod_cgroups() for folder in (*top.glob(f"pod{uid}/*/"), *top.glob(f"*/pod{uid}/*/"))]


def _runs(pid: int, program: str) -> bool:
    try:
        return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
