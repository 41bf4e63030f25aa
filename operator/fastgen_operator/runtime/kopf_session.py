"""kopf's HTTP session. kopf lists and watches each kind in each namespace, and ends at an unexpected answer.

This session gives it only answers that it can handle, so that one bad object, list or watch stops nothing else:

- A list is made by the operator itself, in pages of limited size and straight into the cache. kopf gets the version.
- Each line of a watch is reduced to what the operator reads before kopf decodes it (`kube/compact.py`).
- A watch that the API server rejects or ends with an error looks to kopf as if its version were too old (410). kopf
  then lists and watches again. kopf itself handles 401 by a new login, and a broken connection by a new watch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

import aiohttp

from fastgen_operator.decode import decode, decode_event
from fastgen_operator.kinds import Key, Kind, Object
from fastgen_operator.kube.compact import compact
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.sources import Source, Sources, describe
from fastgen_operator.kube.transport import KubeError, seconds_of
from fastgen_operator.kube.watch_health import Watches

logger = logging.getLogger(__name__)

# Lists at the same time. They have threads of their own: one that hangs must not keep a worker from a reconcile.
THREADS: Final = 4
# Seconds before a failed watch is opened again, and the maximum; the pause doubles in between.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# A watch that ends within this many seconds counts as failed.
_SHORTEST: Final = 1.0
# A watch that stays open for this many seconds works, even without an event: the API server may send none for minutes.
_PROVEN: Final = 5.0
# Lines are decoded in a thread from this size on, so that the event loop goes on.
_LARGE: Final = 1 << 16
_CHUNK: Final = 1 << 18
# Maximum bytes of an event. The API server accepts no object of this size.
_LONGEST_LINE: Final = 8 << 20
_GONE: Final = b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'
_EXPIRED: Final = 410


class WatchError(Exception):
    """A watch ended with an error; the message is the API server's, or says what is wrong with the stream.

    Attributes:
        code: HTTP status of the response, or code of the ERROR event; None without one.
        retry_after: seconds of the Retry-After header; 0 without one.
    """

    def __init__(self, message: str, code: int | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


@dataclass
class Feed:
    """What a session lists and watches, and where it reports changes and failures.

    Attributes:
        kinds: the watched kinds.
        scopes: the namespaces with watches of their own; (None,) for all.
        wake: called in the event loop with each resource for which a list has corrected the cache.
    """

    kinds: Iterable[Kind]
    scopes: Iterable[str | None]
    relister: Relister
    sources: Sources
    watches: Watches
    wake: Callable[[Key], None]
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "list"))
    _failures: dict[Source, int] = field(default_factory=dict)

    def by_path(self) -> dict[str, Source]:
        """Return the sources by the URL path of their lists and watches."""
        return {kind.path(scope): (kind, scope) for scope in self.scopes for kind in self.kinds}

    def works(self, source: Source) -> None:
        """Record that a watch works: it has delivered an event, or stayed open."""
        self._failures.pop(source, None)
        self.sources.succeeded(source, "watch")

    async def fail(self, source: Source, error: WatchError) -> None:
        """Record that a watch has failed, and return when it may be opened again."""
        failures = self._failures[source] = self._failures.get(source, 0) + 1
        self.watches.failed(*source)
        if error.code == _EXPIRED and failures == 1:
            logger.debug("watching %s: %s", describe(source), error)
        else:
            self.sources.failed(source, "watch", str(error))
        backoff = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 1, 10))
        await asyncio.sleep(max(backoff, error.retry_after))


class KopfSession:
    """A session for `kopf.AiohttpSession`: kopf uses no other methods than these.

    Args:
        session: sends the requests.
        server: URL of the API server, with which all URLs of kopf begin.
    """

    def __init__(self, session: aiohttp.ClientSession, server: str, feed: Feed) -> None:
        self._session, self._feed = session, feed
        self._base = urlsplit(server).path.rstrip("/")
        self._by_path = feed.by_path()

    @property
    def headers(self) -> Any:
        """Headers of all requests."""
        return self._session.headers

    @property
    def closed(self) -> bool:
        """Whether the session is closed."""
        return self._session.closed

    async def close(self) -> None:
        """Close the session and its connections."""
        await self._session.close()

    async def request(self, *, method: str, url: str, **options: Any) -> Any:
        """Send a request of kopf; return a response with the attributes that kopf reads.

        A list is not sent as kopf made it: the operator lists in pages, and the response has `status` and `json()` with
        the version and no items. The response to a watch has `status` and `content`.

        Raises:
            aiohttp.ClientConnectionError: a list failed, or there is no connection. kopf retries.
        """
        parts = urlsplit(url)
        source = self._by_path.get(parts.path.removeprefix(self._base))
        if source is None:
            return await self._session.request(method, url, **options)
        if "watch" in parse_qs(parts.query):
            response = await self._session.request(method, url, **options)
            # kopf logs in again after 401.
            return response if response.status == 401 else _Watch(response, source, self._feed)
        return await self._list(source)

    async def _list(self, source: Source) -> _List:
        loop, feed = asyncio.get_running_loop(), self._feed
        try:
            version, changed = await loop.run_in_executor(
                feed.threads, lambda: feed.relister.list(source, opens_watch=True)
            )
        except KubeError as error:
            await asyncio.sleep(error.retry_after)
            # kopf retries after a connection error, but not after all other errors.
            raise aiohttp.ClientConnectionError(str(error)) from error
        for key in changed:
            feed.wake(key)
        return _List({"metadata": {"resourceVersion": version}, "items": []})


@dataclass(frozen=True)
class _List:
    """The response to a list that this operator has made itself."""

    body: Mapping[str, Any]
    status: int = 200

    async def json(self) -> Mapping[str, Any]:
        return self.body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class _Watch:
    """The response to a watch. One that the API server rejected yields only an ERROR event."""

    response: aiohttp.ClientResponse
    source: Source
    feed: Feed
    status: int = 200

    @property
    def content(self) -> Self:
        return self

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """Yield the reduced events, each with a line break; after a failure, an ERROR event with code 410.

        Raises:
            aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError: the connection broke after at least
                `_SHORTEST` seconds. kopf opens the watch again.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if self.response.status >= 400:
                words, wait = _message(_decoded(await self.response.read())), self.response.headers.get("Retry-After")
                raise WatchError(words, self.response.status, seconds_of(wait))
            proof = loop.call_later(_PROVEN, self.feed.works, self.source)
            try:
                async for line in _lines(self.response.content):
                    if (event := await self._reduced(line)) is not None:
                        yield event
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                if loop.time() - began >= _SHORTEST:
                    raise
            finally:
                proof.cancel()
            if loop.time() - began < _SHORTEST:
                # kopf would open it again at once, without end.
                raise WatchError("the watch was closed at once", _EXPIRED)
        except WatchError as error:
            self.close()
            await self.feed.fail(self.source, error)
            yield _GONE

    async def _reduced(self, line: bytes) -> bytes | None:
        """Return the event with its object reduced; None if it cannot be read.

        Raises:
            WatchError: it is an ERROR event.
        """
        kind = self.source[0]
        try:
            if len(line) < _LARGE:
                return self._event(*_read(kind, line))
            return self._event(*await asyncio.get_running_loop().run_in_executor(None, _read, kind, line))
        except WatchError:
            raise
        except Exception:
            # A later list finds the object, or at least its deletion.
            logger.exception("watching %s: an event cannot be read", describe(self.source))
            return None

    def _event(self, name: str, obj: Any) -> bytes:
        if name == "ERROR":
            raise WatchError(_message(obj), obj.get("code") if isinstance(obj, dict) else None)
        self.feed.works(self.source)
        return json.dumps({"type": name, "object": obj}).encode() + b"\n"

    def close(self) -> None:
        self.response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _read(kind: Kind, line: bytes) -> tuple[str, Any]:
    """Return the type and the object of an event, reduced to what the operator reads."""
    name, obj = decode_event(line)
    return name, obj if name in ("ERROR", "BOOKMARK") else compact(kind, obj)


def _decoded(data: bytes) -> Any:
    """Return the decoded body of an error, or its text."""
    try:
        return decode(data)
    except ValueError:
        return data.decode(errors="replace")


def _message(status: Object | Any) -> str:
    """Return the message of an error."""
    words = status.get("message") or status.get("reason") if isinstance(status, dict) else status
    return " ".join(str(words or "the watch ended with an error").split())[:500]


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream without line breaks. Raises WatchError for a line that is too long."""
    buffer = bytearray()
    async for chunk in content.iter_chunked(_CHUNK):
        buffer += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in filter(None, lines):
                yield line
        if len(buffer) > _LONGEST_LINE:
            raise WatchError(f"an event has more than {_LONGEST_LINE >> 20} MiB")
