"""The folder of one model: its files and their records.

    FOLDER/config.json, ...           files, each renamed to its name when complete
    FOLDER/.fastgen/NAME.TAG.part     a partial file
    FOLDER/.fastgen/files.json        size and tag of each file, written before it gets its name
    FOLDER/.fastgen/complete.json     the marker, written last: without it the download is incomplete
    FOLDER/.fastgen/lock              held by the downloading process

If a process is killed at any point, the next one can continue with its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fastgen.fetch.remote import RemoteFile

MARKER: Final = "complete.json"
_STATE: Final = ".fastgen"


class ModelFolder:
    """A model's folder, which may not exist yet. Any method may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path / _STATE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if missing, and hold its lock; wait for another holder."""
        self._state.mkdir(parents=True, exist_ok=True)
        with (self._state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_complete(self) -> bool:
        """Return whether the marker exists and every file it names has its size."""
        sizes = _read(self._state / MARKER).get("files", {})
        return bool(sizes) and all(_size(self.path / name) == size for name, size in sizes.items())

    def holds(self, file: RemoteFile) -> bool:
        """Return whether this exact file is present and complete."""
        known = _read(self._state / "files.json").get(file.name)
        return known == {"size": file.size, "tag": file.tag} and _size(self.path / file.name) == file.size

    def part(self, file: RemoteFile) -> Path:
        """Return the path of the partial file. It depends on the tag, so that changed content starts anew."""
        return self._state / f"{file.name}.{hashlib.sha256(file.tag.encode()).hexdigest()[:12]}.part"

    def fetched(self, file: RemoteFile) -> int:
        """Return how many bytes of the file are present."""
        return file.size if self.holds(file) else min(file.size, _size(self.part(file)) or 0)

    def tidy(self, files: Iterable[RemoteFile]) -> None:
        """Remove the marker, and everything that these files do not need.

        Complete ones of them, their partial files and the records stay.
        """
        wanted = tuple(files)
        (self._state / MARKER).unlink(missing_ok=True)
        kept = {self.path / file.name for file in wanted if self.holds(file)} | {self._state}
        kept |= {self.part(file) for file in wanted} | {self._state / "lock", self._state / "files.json"}
        for entry in [*self.path.iterdir(), *self._state.iterdir()]:
            if entry not in kept:
                _remove(entry)

    def keep(self, file: RemoteFile) -> None:
        """Record a file that is received completely, and rename its partial file to its name."""
        record = {**_read(self._state / "files.json"), file.name: {"size": file.size, "tag": file.tag}}
        # The record comes first: with only the record, the file does not count as present.
        _write(self._state / "files.json", record)
        self.part(file).replace(self.path / file.name)

    def finish(self, files: Iterable[RemoteFile], **about: str) -> None:
        """Write the marker; keywords name the origin of the files."""
        _sync(self.path)
        _write(self._state / MARKER, {**about, "files": {file.name: file.size for file in files}})

    def evict_siblings(self, keep: Iterable[str]) -> list[str]:
        """Remove the model folders next to this one, except those in `keep`; return the removed names."""
        names = {self.path.name, *keep}
        siblings = [entry.parent for entry in self.path.parent.glob(f"*/{_STATE}") if entry.parent.name not in names]
        for sibling in sorted(siblings):
            # The marker goes first, so that a half-removed folder does not count as complete.
            (sibling / _STATE / MARKER).unlink(missing_ok=True)
            _remove(sibling)
        return sorted(sibling.name for sibling in siblings)


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as out:
        json.dump(values, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    new.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
