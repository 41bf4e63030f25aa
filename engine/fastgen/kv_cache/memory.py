"""Available host memory: that of the machine, or what a container's limit leaves if it is less."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# cgroup v1 encodes "no limit" as a number near 2^63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that can still be allocated, and whether a container limit bounds them."""

    num_bytes: int
    limited: bool


def trim_heap() -> None:
    """Return freed heap memory to the system. glibc would keep it: 200 MiB after loading a small model."""
    with contextlib.suppress(AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def available_memory(root: Path = _ROOT, meminfo: Path = _MEMINFO, *, drops_active: bool = False) -> AvailableMemory:
    """Return the memory that this process can still allocate.

    Page cache that the kernel can drop counts as free; with `drops_active`, recently used pages too, for example of a
    model that was downloaded and verified in this container.
    """
    machine = _available_on_machine(meminfo)
    left = _left_in_container(root, ("inactive_file", "active_file") if drops_active else ("inactive_file",))
    if left is None or left >= machine:
        return AvailableMemory(machine, limited=False)
    return AvailableMemory(left, limited=True)


def _available_on_machine(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{meminfo} has no MemAvailable")


def _left_in_container(root: Path, free: Sequence[str]) -> int | None:
    """Return what the limit of this process's cgroup leaves; None without a limit. The counters `free` count as free.

    Reads the files of cgroup v2 or v1 where a container sees its own.
    """
    for limit_path, usage_path, stat_path, prefix in (
        (root / "memory.max", root / "memory.current", root / "memory.stat", ""),
        (
            root / "memory/memory.limit_in_bytes",
            root / "memory/memory.usage_in_bytes",
            root / "memory/memory.stat",
            "total_",
        ),
    ):
        try:
            limit_text = limit_path.read_text().strip()
            if limit_text == "max" or int(limit_text) >= _NO_LIMIT:
                return None
            used = int(usage_path.read_text())
            stat = dict(line.split() for line in stat_path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        return max(0, int(limit_text) - used + sum(int(stat.get(prefix + name, 0)) for name in free))
    return None
