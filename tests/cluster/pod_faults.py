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


def stop(pod: dict[str, Any]) -> None:
    """Stop all processes of the engine's container, as SIGSTOP does. The kubelet can still kill them.

    Raises RuntimeError if there is none.
    """
    stopped: set[int] = set()
    # A process can start others until it is stopped.
    while found := {pid for folder in _folders(pod) for pid in _pids(folder)} - stopped:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        stopped |= found
    if not stopped:
        raise RuntimeError(f"pod {pod['metadata']['name']}: its container has no process here")


def _folders(pod: dict[str, Any]) -> list[Path]:
    """Return the folders of the engine's container, one in each hierarchy; none before it runs."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    ids = [status.get("containerID", "").rpartition("/")[2] for status in statuses if status["name"] == "engine"]
    uid = pod["metadata"]["uid"]
    # The folders between are the classes of service: burstable, besteffort or none.
    return [
        folder
        for top in pod_cgroups()
        for container in ids
        if container
        for folder in (*top.glob(f"pod{uid}/{container}"), *top.glob(f"*/pod{uid}/{container}"))
    ]


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
