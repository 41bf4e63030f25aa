"""The digests of the served model's files, read when the first request asks for a receipt."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from fastgen.model.file_digests import FileDigest, FilesAtStart
from fastgen.server.http.api_error import APIError
from fastgen.settings import ConfigError


class FileDigests:
    """Reads the files once, in a thread, however many requests wait for it.

    They describe the weights that the engine has, because the files must not have changed since before it read them.

    Args:
        files: the files as they were before the engine read them.
    """

    def __init__(self, files: FilesAtStart) -> None:
        self._files = files
        self._reading: asyncio.Future[list[FileDigest]] | None = None

    async def get(self) -> list[FileDigest]:
        """Return the digests. The first call may take seconds; it is made again if the last one failed.

        Raises:
            APIError: if a file cannot be read, or has changed since the server started.
        """
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            self._reading = asyncio.get_running_loop().create_future()
            # A daemon, so that it does not delay the end of a server. It gives up the interpreter's lock while it
            # computes.
            threading.Thread(target=self._read, args=(self._reading,), name="file-digests", daemon=True).start()
        try:
            # A client that leaves must not cancel it for the others.
            return await asyncio.shield(self._reading)
        except ConfigError as error:
            raise APIError(
                409, f"receipt: {error}; restart the server, or leave it out", code="model_changed", param="receipt"
            ) from None

    def _read(self, reading: asyncio.Future[list[FileDigest]]) -> None:
        loop = reading.get_loop()
        with suppress(RuntimeError):  # the loop is closed
            try:
                digests = self._files.digests()
            except Exception as error:
                loop.call_soon_threadsafe(reading.set_exception, error)
            else:
                loop.call_soon_threadsafe(reading.set_result, digests)
