"""SHA-256 of a model's files: weights, configuration, tokenizer and chat templates. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from fastgen.fetch.remote import WANTED
from fastgen.settings import ConfigError


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, size in bytes and hexadecimal SHA-256 of one of a model's files."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file, and what changes when it is written or replaced."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def now(cls, path: Path) -> _Seen:
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class FilesAtStart:
    """A model's files as they were when this object was created, before the model is loaded."""

    files: tuple[_Seen, ...]

    @classmethod
    def of(cls, path: Path) -> FilesAtStart:
        """Remember the state of a GGUF file, or of a directory's files that serving needs.

        Raises:
            ConfigError: if they cannot be read.
        """
        try:
            paths = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if _is_wanted(entry))
            return cls(tuple(map(_Seen.now, paths)))
        except OSError as error:
            raise ConfigError(f"model {path}: its files cannot be read ({error})") from None

    def digests(self) -> list[FileDigest]:
        """Read the files and return their digests, sorted by name. Takes seconds for large models.

        Raises:
            ConfigError: if a file cannot be read, or has changed since this object was created.
        """
        return [_digest(seen) for seen in self.files]


def differences(expected: Sequence[FileDigest], found: FilesAtStart) -> list[str]:
    """Return how files differ from digests of them, a phrase for each; empty if they are equal.

    Contents are read only if names and sizes are equal. The name of a single file, which is a GGUF file, may differ.

    Raises:
        ConfigError: as `FilesAtStart.digests`.
    """
    wanted, sizes = {file.name: file for file in expected}, {seen.path.name: seen.size for seen in found.files}
    if len(expected) == len(found.files) == 1:
        wanted = dict.fromkeys(sizes, expected[0])
    faults = [f"{name} is missing" for name in wanted if name not in sizes]
    faults += [f"{name} is not in the receipt" for name in sizes if name not in wanted]
    faults += [
        f"{name} has {sizes[name]} bytes instead of {file.size}"
        for name, file in wanted.items()
        if sizes.get(name, file.size) != file.size
    ]
    if faults:
        return faults
    return [f"{file.name} has other content" for file in found.digests() if file.sha256 != wanted[file.name].sha256]


def _is_wanted(path: Path) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in WANTED) and path.is_file()


def _digest(seen: _Seen) -> FileDigest:
    try:
        with seen.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        unchanged = _Seen.now(seen.path) == seen
    except OSError as error:
        raise ConfigError(f"{seen.path}: cannot be read ({error.strerror or error})") from None
    if not unchanged:
        raise ConfigError(f"{seen.path}: has changed since the model was loaded")
    return FileDigest(name=seen.path.name, size=seen.size, sha256=digest)
