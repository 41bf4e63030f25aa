"""One file from its source to the disk, through cuts of the connection."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastgen.fetch.errors import FetchError, Interrupted
from fastgen.fetch.remote import Remote, RemoteFile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after what time the same is tried again; seconds, doubling from `first` to `longest`.

    `limit` counts failures in a row without a byte between them: a source that gives a little each time is stayed with.
    """

    limit: int = 6
    first: float = 1.0
    longest: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def run(self, attempt: Callable[[], T], received: Callable[[], int], say: Callable[[str], None]) -> T:
        """The attempt's result; `received` gives the bytes so far, `say` is told of each failure.

        Raises:
            Interrupted: the last of too many.
        """
        failures, before = 0, received()
        while True:
            try:
                return attempt()
            except Interrupted as error:
                now = received()
                failures, before = (1 if now > before else failures + 1), now
                if failures >= self.limit:
                    raise
                wait = min(self.longest, self.first * 2 ** (failures - 1))
                say(f"{error}; trying again in {wait:.0f} s")
                self.sleep(wait)


def transfer(remote: Remote, file: RemoteFile, part: Path, count: Callable[[int], None]) -> None:
    """Appends to `part` what it lacks of the file, and checks the whole; `count` is told of bytes as they come.

    Raises:
        Interrupted: the source ended early; `part` keeps what came.
        FetchError: what came is not the file; `part` is gone.
        OSError: it could not be written.
    """
    with part.open("ab") as out:
        if out.tell() < file.size:
            with remote.read(file, out.tell()) as chunks:
                for chunk in chunks:
                    out.write(chunk)
                    count(len(chunk))
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    if size < file.size:
        raise Interrupted(f"{file.path}: the answer ended after {size} of {file.size} bytes")
    if size > file.size or (file.sha256 is not None and _sha256(part) != file.sha256):
        part.unlink()
        raise FetchError(f"{file.path}: what came is not the file that was listed: its checksum or size differs")


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
