"""Lists and watches of the API server."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from yarl import URL

from fastgen_operator.decode import decode, decode_event, decode_page
from fastgen_operator.kinds import Object
from fastgen_operator.page_limit import PAGE_BYTES, PageLimit

_LIST_SECONDS: Final = 30.0
# The API server ends a watch after this time. A connection that is dead without a sign is found a little later.
_WATCH_SECONDS: Final = 60
_MARGIN_SECONDS: Final = 15.0
# An object has at most 1.5 MB.
_MOST_LINE_BYTES: Final = 8 << 20
# Larger events, and pages of lists, are decoded in a thread: a deeply nested object can take half a second.
_LARGE_BYTES: Final = 1 << 16
_CHUNK: Final = 1 << 16
_GONE: Final = 410

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """The API server rejected a request. `status` is the HTTP status, or that of an event of type ERROR."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status

    @property
    def is_expired(self) -> bool:
        """Whether the resource version is too old: list again."""
        return self.status == _GONE


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to reach the API server.

    Attributes:
        url: for example https://10.0.0.1:443.
        token_file: bearer token; None for none. The kubelet replaces its content.
        ca_file: certificates of the authority; None for the system's. The kubelet replaces its content, too.
    """

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None


class ApiServer:
    """Reads lists and watches over one session."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._base = URL(credentials.url)
        self._page_limits: dict[str, PageLimit] = {}  # of the last list, by path
        self._tls: ssl.SSLContext | bool = True
        self._trusted: bytes | None = None

    async def __aenter__(self) -> ApiServer:
        """Open the session. Raises OSError or SSLError if the file of the authority cannot be read."""
        if self._credentials.ca_file is not None:
            self._trust(self._credentials.ca_file)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the session."""
        await self._session.close()

    async def pages(self, path: str, selector: str | None) -> AsyncIterator[tuple[str, Iterator[Object]]]:
        """Yield each page of a list: the list's resource version, and an iterator that decodes one object at a time.

        If a page does not arrive in time, the next list of this path begins with fewer objects.

        Raises:
            ApiError: the API server rejects the request.
            aiohttp.ClientError, OSError, TimeoutError, ValueError: it cannot be reached, or its response is unusable.
        """
        query = {"labelSelector": selector} if selector else {}
        limit = self._page_limits.setdefault(path, PageLimit())
        while True:
            metadata, objects = await self._page(path, query, limit)
            yield metadata["resourceVersion"], objects
            if not (more := metadata.get("continue")):
                return
            query["continue"] = more

    async def _page(self, path: str, query: dict[str, str], limit: PageLimit) -> tuple[Object, Iterator[Object]]:
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS)
        while True:
            began = time.monotonic()
            try:
                async with self._get(path, {**query, "limit": str(limit.objects)}, timeout) as response:
                    body = await _body(response)
            except (TimeoutError, ApiError) as error:
                if not isinstance(error, ApiError) or error.status == 504:
                    limit.too_slow()
                raise
            if body is not None:
                limit.follow(len(body), time.monotonic() - began)
                return await asyncio.to_thread(decode_page, body)
            limit.too_large()

    async def watch(self, path: str, selector: str | None, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield the type and object of each event since a version, until the API server ends the watch.

        Raises:
            ApiError: the API server rejects the request, or ends the watch with an error.
            aiohttp.ClientError, OSError, TimeoutError, ValueError: the connection or an event is unusable.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(total=_WATCH_SECONDS + _MARGIN_SECONDS, sock_connect=_MARGIN_SECONDS)
        async with self._get(path, query, timeout) as response:
            if response.status != 200:
                await _body(response)
            async for line in _lines(response):
                is_large = len(line) > _LARGE_BYTES
                kind_of_event, changed = await asyncio.to_thread(decode_event, line) if is_large else decode_event(line)
                if kind_of_event == "ERROR":
                    raise ApiError(int(changed.get("code") or 500), str(changed.get("message")))
                yield kind_of_event, changed

    def _get(self, path: str, query: dict[str, str], timeout: aiohttp.ClientTimeout) -> Any:
        headers = {"Accept": "application/json"}
        if self._credentials.token_file is not None:
            headers["Authorization"] = f"Bearer {self._credentials.token_file.read_text().strip()}"
        url = self._base.with_path(self._base.path.rstrip("/") + path)
        # Connections with other certificates are not used again.
        return self._session.get(
            url, params=query, headers=headers, timeout=timeout, allow_redirects=False, ssl=self._context()
        )

    def _context(self) -> ssl.SSLContext | bool:
        """Return the TLS settings for a request: those of the file as it is now, or as it was when it was usable."""
        if self._credentials.ca_file is not None:
            try:
                self._trust(self._credentials.ca_file)
            except OSError as error:
                logger.warning("cannot read %s: %s; keeping the previous one", self._credentials.ca_file, error)
        return self._tls

    def _trust(self, file: Path) -> None:
        """Trust the certificates of a file, if it has changed. Raises OSError or SSLError if it cannot be used."""
        content = file.read_bytes()
        if content != self._trusted:
            # If it changes meanwhile, the next request reads it again.
            self._tls = ssl.create_default_context(cafile=str(file))
            self._trusted = content


async def _body(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the body of a response, or None if it has more than `PAGE_BYTES`; raise ApiError for an error."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(_CHUNK):
        size += len(part)
        if size > PAGE_BYTES:
            return None  # the rest is not read: the connection is closed
        parts.append(part)
    body = b"".join(parts)
    if response.status != 200:
        try:
            message = decode(body)["message"]
        except (ValueError, LookupError, TypeError):
            message = body[:200].decode(errors="replace")
        raise ApiError(response.status, str(message))
    return body


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for part in response.content.iter_chunked(_CHUNK):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > _MOST_LINE_BYTES:
            raise ValueError(f"an event is larger than {_MOST_LINE_BYTES >> 20} MiB")
        if lines:
            await asyncio.sleep(0)  # many events at once hold up no request
