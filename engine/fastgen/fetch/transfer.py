"""Transfer one file to disk, resuming after broken connections."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastgen.fetch.errors import FetchError, Interrupted
from fastgen.fetch.remote import RemoteFile, RemoteFiles

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy: the waits between attempts, in seconds, double from `first` to `longest`.

    The `limit`-th consecutive failure without progress is the last. Any received byte resets the count.
    """

    limit: int = 6
    first: float = 1.0
    longest: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def run(self, attempt: Callable[[], T], received: Callable[[], int], say: Callable[[str], None]) -> T:
        """Return the attempt's result; `received` returns the bytes so far, `say` reports each failure.

        Raises:
            Interrupted: the last attempt failed, see `limit`. Other errors of an attempt are raised at once.
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


def transfer(remote: RemoteFiles, file: RemoteFile, part: Path, count: Callable[[int], None]) -> None:
    """Append the missing bytes to `part` and verify the file; `count` receives the number of new bytes.

    Raises:
        Interrupted: the connection broke or the source ended early; `part` keeps its bytes.
        FetchError: the source cannot be read. Or the size or checksum is wrong, and `part` has been removed.
        OSError: writing failed.
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
        raise Interrupted(f"{file.path}: the response ended after {size} of {file.size} bytes")
    if size > file.size or (file.sha256 is not None and _sha256(part) != file.sha256):
        part.unlink()
        raise FetchError(
            f"{file.path}: the received file is not the listed one, its checksum or size differs: download it again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
