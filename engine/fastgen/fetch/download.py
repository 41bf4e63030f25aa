"""Download a model: the files that its source lists, except those that its folder already has."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from fastgen.fetch.errors import FetchError, VolumeFull
from fastgen.fetch.folder import ModelFolder
from fastgen.fetch.progress import Progress, say
from fastgen.fetch.remote import Listing, RemoteFiles
from fastgen.fetch.source import Source
from fastgen.fetch.transfer import Retries, transfer

# Seconds without a byte after which a connection counts as broken.
STALLED_SECONDS = 30.0


def fetch(
    source: Source,
    to: Path,
    *,
    keep: Sequence[str] | None = None,
    retries: Retries | None = None,
    tell: Callable[[str], None] = say,
) -> None:
    """Download a model into the folder `to`; return at once if it holds a complete model of any source.

    `keep`, if given, names the sibling model folders to keep. All others are removed first.

    Raises:
        FetchError: the source is invalid, or the download failed. Partial files are kept for the next attempt, except
            one whose size or checksum is wrong.
    """
    folder = ModelFolder(to)
    with _disk_errors(to), folder.locked():
        if keep is not None:
            for name in folder.evict_siblings(keep):
                tell(f"removed the unused model folder {name}")
        if folder.is_complete():
            tell(f"{to} is complete")
            return
        attempts = retries or Retries()
        remote = source.open(STALLED_SECONDS)
        listing = attempts.run(remote.list, lambda: 0, tell)
        folder.tidy(listing.files)
        _fetch_files(remote, listing, folder, attempts, tell)
        folder.finish(listing.files, source=source.text, revision=source.revision, version=listing.version)
        tell(f"{to} is complete")


def _fetch_files(
    remote: RemoteFiles, listing: Listing, folder: ModelFolder, retries: Retries, tell: Callable[[str], None]
) -> None:
    total = sum(file.size for file in listing.files)
    here = sum(folder.fetched(file) for file in listing.files)
    free = shutil.disk_usage(folder.path).free
    if total - here > free:
        raise VolumeFull(
            f"{folder.path}: the download needs {decimal(total - here)} more, but the volume has only {decimal(free)} "
            "free: use a larger volume, or free space on it"
        )
    tell(f"{len(listing.files)} files, {decimal(total)}, of which {decimal(here)} are present")
    progress = Progress(total, here, tell=tell)
    for file in listing.files:
        if not folder.holds(file):
            attempt = partial(transfer, remote, file, folder.part(file), progress.count)
            retries.run(attempt, lambda: progress.received, tell)
            folder.keep(file)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise VolumeFull(f"the volume of {folder} is full: use a larger volume, or free space on it") from None
        raise FetchError(f"{error.filename or folder}: {error.strerror or error}") from None
