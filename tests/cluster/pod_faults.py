"""Slows, stops, pauses or kills the processes of one pod from outside, through its cgroups on a native node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster.traces import pod_cgroups

# Quotas are per period. A short one lets a slow process answer probes in time.
PERIOD_MICROSECONDS = 20_000


def limit_cpus(pod: dict[str, Any], cpus: float) -> None:
    """Let the engine's container use no more than that many CPUs, whatever its pod requests.

    Raises RuntimeError if the container has no cgroup here.
    """
    if not any(limit_group(folder, cpus) for folder in _folders(pod)):
        raise RuntimeError(f"pod {pod['metadata']['name']}: its container has no cgroup that limits the CPU")


def limit_group(folder: Path, cpus: float) -> bool:
    """Let the processes of a cgroup use no more than that many CPUs; return whether the cgroup limits the CPU."""
    quota = int(cpus * PERIOD_MICROSECONDS)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        return True
    if (folder / "cpu.cfs_quota_us").exists():
        # Set the quota first: a shorter period alone would let the container exceed the limit of its pod.
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        return True
    return False


def stop_next(program: str, seconds: float) -> str:
    """Stop the next engine that starts on this node, as SIGSTOP does, and return the uid of its pod.

    It watches the cgroups: on a busy machine, an engine can be ready before the API server shows that it runs. The
    kubelet can still kill what is stopped.

    Args:
        program: words of the engine's command.

    Raises:
        RuntimeError: no pod started it in time.
    """
    known = set(_pods())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for uid in _pods():
            if uid not in known and _stop(uid, program):
                return uid
        time.sleep(0.02)
    raise RuntimeError(f"no new pod runs {program} after {seconds:g} s")


@contextmanager
def paused(pod: dict[str, Any], program: str) -> Iterator[None]:
    """Stop the processes of a pod that run the program, and let them go on at the end.

    Raises RuntimeError if there are none.
    """
    uid = pod["metadata"]["uid"]
    if not _stop(uid, program):
        raise RuntimeError(f"pod {pod['metadata']['name']}: no process runs {program}")
    try:
        yield
    finally:
        for pid in [pid for folder in _containers(uid) for pid in _pids(folder)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def kill(pod: dict[str, Any], program: str) -> None:
    """Kill the processes of a pod that run the program, as a crash ends them.

    Raises RuntimeError if there are none.
    """
    found = {pid for folder in _containers(pod["metadata"]["uid"]) for pid in _pids(folder) if _runs(pid, program)}
    if not found:
        raise RuntimeError(f"pod {pod['metadata']['name']}: no process runs {program}")
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stop(uid: str, program: str) -> bool:
    """Stop the pod's processes that run the program; return whether there are any."""
    stopped: set[int] = set()
    # A process can start others until it is stopped.
    while found := {pid for folder in _containers(uid) for pid in _pids(folder) if _runs(pid, program)} - stopped:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        stopped |= found
    return bool(stopped)


def _pods() -> list[str]:
    """Return the uids of the pods that have a cgroup."""
    folders = [folder for top in pod_cgroups() for folder in (*top.glob("pod*/"), *top.glob("*/pod*/"))]
    return [folder.name.removeprefix("pod") for folder in folders]


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
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False
    return program.encode() in command


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
