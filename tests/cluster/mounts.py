"""Mounts of this machine, from the kernel's mount table."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cluster.commands import CommandError, run


def mounted_below(folder: Path, table: str | None = None) -> list[Path]:
    """Return the mount points at or below the folder, deepest first. `table` defaults to the kernel's."""
    lines = (Path("/proc/self/mounts").read_text() if table is None else table).splitlines()
    points = [Path(_unescaped(line.split(" ")[1])) for line in lines]
    return sorted((p for p in points if p.is_relative_to(folder)), key=lambda p: len(p.parts), reverse=True)


def unmount_below(folder: Path) -> None:
    """Unmount everything at or below the folder. A mount in use disappears when its last user exits."""
    for point in mounted_below(folder):
        with contextlib.suppress(CommandError):
            run(["umount", "--lazy", point])


def _unescaped(field: str) -> str:
    # The kernel escapes space, tab, newline and backslash in octal.
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
