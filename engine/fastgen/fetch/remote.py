"""Remote sources: files with sizes and tags, reduced to those that serving needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Protocol

from fastgen.fetch.errors import FetchError, SourceNotFound
from fastgen.setting_fields import is_utf8

WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.*", "merges.txt")
"""Weights, configuration, tokenizer and chat templates; never code, or the same weights in another format."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a source.

    Attributes:
        path: path in the source.
        size: size in bytes.
        tag: identifier of the content: different contents have different tags.
        sha256: hexadecimal SHA-256 of the content; None if the source does not provide it.

    Raises:
        FetchError: if the path names no file inside the source.
    """

    path: str
    size: int
    tag: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        names_file = parts[0] and parts[-1] not in ("", ".") and ".." not in parts
        if not names_file or "\0" in self.path or not is_utf8(self.path):
            raise FetchError(
                f"{self.path!r}: a file of the source, whose path cannot be used: rename or remove it there"
            )

    @property
    def name(self) -> str:
        """Return the file's name in the model's folder, which is flat."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Listing:
    """Files to download; `version` is the source's identifier of this exact state; empty if it has none."""

    version: str
    files: tuple[RemoteFile, ...]


class RemoteFiles(Protocol):
    """A model's source.

    All methods, and reading the bytes, raise Interrupted if a retry may work, and another FetchError otherwise.
    """

    def list(self) -> Listing:
        """Return the files to download."""
        ...

    def read(self, file: RemoteFile, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """Open the file's bytes from `start`, in chunks. They may end early without an error."""
        ...


def select_model(source: str, files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return the files of a folder that a model in Hugging Face's layout needs.

    Raises:
        SourceNotFound: the folder has no such model.
    """
    offered = tuple(files)
    names = [file.name for file in offered]
    # Some repositories have the weights twice: in this layout and in their author's own.
    usual = any(fnmatchcase(name, "model*.safetensors") for name in names)
    skipped = "consolidated*" if usual else ""
    found = tuple(
        file
        for file in offered
        if any(fnmatchcase(file.name, pattern) for pattern in WANTED) and not fnmatchcase(file.name, skipped)
    )
    chosen = {file.name for file in found}
    if "config.json" in chosen and any(name.endswith(".safetensors") for name in chosen):
        return found
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise SourceNotFound(
            f"{source}: holds GGUF files: name one of them, for example {source.rstrip('/')}/{ggufs[0]}"
        )
    missing = "config.json" if "config.json" not in chosen else "*.safetensors"
    raise SourceNotFound(f"{source}: holds no {missing}: name a model in Hugging Face's layout, or a GGUF file")
