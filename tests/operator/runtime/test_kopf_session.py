"""What kopf is told about watches that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest

from fastgen_operator.kinds import POD
from fastgen_operator.kube.sources import Source, Sources
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.runtime import kopf_session
from fastgen_operator.runtime.kopf_session import Feed, KopfSession, WatchError

PODS = (POD, None)
EVENT = b'{"type":"ADDED","object":{"metadata":{"name":"a","namespace":"b"}}}\n'


class Response:
    """A watch that delivers these parts and ends, after `until` and with the error if they are given."""

    status = 200

    def __init__(self, *parts: bytes, error: Exception | None = None, until: asyncio.Event | None = None) -> None:
        self.parts, self.error, self.until, self.content = parts, error, until, self

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        if self.until is not None:
            async with asyncio.timeout(60):
                await self.until.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Feed:
    """A feed without pauses, of watches that are open for less than a minute."""
    monkeypatch.setattr(kopf_session, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(kopf_session, "_SHORTEST", 60.0)  # a watch that ends at once ends long before
    unused: Any = None
    return Feed((POD,), (None,), unused, Sources((None,)), Watches(lambda: 0.0, ()), unused)


async def told(feed: Feed, response: Any) -> list[bytes]:
    """Return what kopf reads of a watch."""
    return [line async for line in kopf_session._Watch(response, PODS, feed).iter_chunked(1)]


@pytest.mark.parametrize("error", [None, aiohttp.ClientPayloadError("reset"), TimeoutError()])
async def test_a_watch_that_is_closed_at_once_again_and_again_is_a_failure(error: Exception | None, feed: Feed) -> None:
    """A proxy between, for example. kopf itself would open it again without a pause."""
    response = Response(error=error)
    assert await told(feed, response) == [kopf_session._GONE]
    assert feed.sources.first_failure() == "", "once may be a restart of the API server"
    assert await told(feed, response) == [kopf_session._GONE]
    assert feed.sources.first_failure() == "pods: the watch was closed at once"
    assert len(await told(feed, Response(EVENT))) == 2
    assert feed.sources.first_failure() == ""


async def test_a_watch_that_ends_after_a_while_is_opened_again_by_kopf(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_session, "_SHORTEST", 0.0)
    assert await told(feed, Response()) == []
    assert len(await told(feed, Response(EVENT))) == 1
    with pytest.raises(aiohttp.ClientPayloadError):
        await told(feed, Response(error=aiohttp.ClientPayloadError("reset")))
    assert feed.sources.first_failure() == ""


async def test_a_watch_that_stays_open_can_be_read_although_nothing_changes(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server sends bookmarks only after a change, which a new namespace need not have for many minutes."""
    monkeypatch.setattr(kopf_session, "_PROVEN", 0.01)
    recovered = asyncio.Event()

    def show(_: Source, fails: bool) -> None:
        if not fails:
            recovered.set()

    feed.sources = Sources((None,), show)
    await feed.fail(PODS, WatchError("injected 403", 403))
    assert feed.sources.first_failure() == "pods: injected 403"
    assert await told(feed, Response(until=recovered)) == [kopf_session._GONE]
    assert recovered.is_set()
    assert feed.sources.first_failure() == ""


async def test_a_watch_that_ends_early_does_not_count_as_open_later(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_session, "_PROVEN", 0.01)
    await feed.fail(PODS, WatchError("injected 403", 403))
    assert await told(feed, Response()) == [kopf_session._GONE]
    await asyncio.sleep(0.05)
    assert feed.sources.first_failure() == "pods: the watch was closed at once"


async def test_an_event_without_an_end_and_an_error_event_end_the_watch_and_kopf_lists_again(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_session, "_LONGEST_LINE", 100)
    assert await told(feed, Response(b"x" * 60, b"x" * 60)) == [kopf_session._GONE]
    assert "an event has more than" in feed.sources.first_failure()
    error = b'{"type":"ERROR","object":{"code":500,"message":"etcd is tired"}}\n'
    assert await told(feed, Response(error)) == [kopf_session._GONE]
    assert feed.sources.first_failure() == "pods: etcd is tired"


class Refusal:
    """A watch that is answered with an error."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status, self.headers = status, headers

    async def read(self) -> bytes:
        return b"Too many requests, please try again later."

    def close(self) -> None:
        pass


@pytest.mark.parametrize("status", [429, 503])
async def test_a_watch_is_opened_again_only_after_retry_after(
    status: int, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(kopf_session.asyncio, "sleep", sleep)
    assert await told(feed, Refusal(status, **{"Retry-After": "30"})) == [kopf_session._GONE]
    monkeypatch.setattr(kopf_session, "_FIRST_PAUSE", 40.0)
    assert await told(feed, Refusal(status, **{"Retry-After": "30"})) == [kopf_session._GONE]
    assert slept == [30.0, 60.0], "the longer of it and the backoff"
    assert feed.sources.first_failure() == "pods: Too many requests, please try again later."


async def test_a_list_is_repeated_only_after_retry_after(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Busy:
        def list(self, *_: object, **__: object) -> None:
            raise KubeError(429, "storage is (re)initializing", 17)

    feed.relister = cast(Any, Busy())
    session = KopfSession(cast(Any, None), "https://api", feed)
    monkeypatch.setattr(kopf_session.asyncio, "sleep", sleep)
    with pytest.raises(aiohttp.ClientConnectionError, match="initializing"):
        await session.request(method="get", url=f"https://api{POD.path(None)}")
    assert slept == [17]


async def test_an_event_that_cannot_be_read_is_skipped(feed: Feed) -> None:
    found = await told(feed, Response(b'{"type":"ADDED","object":[]}\n{"type":1}\nx\n' + EVENT, EVENT))
    assert len(found) == 3
    assert found[-1] == kopf_session._GONE, "it was closed at once"
