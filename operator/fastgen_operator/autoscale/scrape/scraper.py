"""Scrape the metrics of many fleets over keep-alive connections.

One fleet cannot hold up the others: each has a limited number of requests in flight, fleets with recent timeouts share
at most half of all requests in flight, and the time to parse the responses of a fleet is limited. See
docs/decisions/047-scrapes-with-aiohttp.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import aiohttp
from yarl import URL

from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.exposition import QUERY, UnusableError, parse_sample
from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.objects.container import HTTP_PORT

# A response has 3 KiB, or 30 KiB if the engine ignores the query.
_LIMIT_BYTES: Final = 1 << 17
# Share of the deadline that parsing all responses of a fleet may take of the event loop's time.
_PARSING_SHARE: Final = 0.25
# Share of all requests in flight that the fleets with a timeout within these seconds have together.
_SLOW_SHARE: Final = 0.5
_SLOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape: pod, IP address, and the model name that its metrics must have."""

    pod: str
    address: str
    model_name: str
    port: int = HTTP_PORT


Scraped = Sample | UnusableError
T = TypeVar("T")
# Reads the metrics of the replica of a model, scraped at a monotonic time.
_Parser = Callable[[str, str, float], T]

# What an engine that loads says it does, and how many percent of it are done, such as `loading weights 43 %`.
_STAGE: Final = re.compile(r"([a-z][a-z -]{0,38}[a-z]) ([0-9]{1,3}) %")
_STAGE_BYTES: Final = 1 << 10


class Scraper(AbstractAsyncContextManager["Scraper"]):
    """Scrapes many fleets concurrently. Leaving the context closes connections and ends running scrapes.

    Args:
        period: scrape interval in seconds. It caps `deadline`, so that a hanging replica does not make others stale.
        concurrency: maximum number of requests in flight.
        concurrency_per_fleet: maximum number of requests in flight to the replicas of one fleet.
        deadline: timeout for one replica in seconds, from connecting to the end of the response.
        keep: number of replicas up to which connections are kept for the next scrape. Each is an open file.
        keep_seconds: idle time after which a connection is closed. Engines close theirs after 75 s, so only
            connections to engines that vanished reach the default.
    """

    def __init__(
        self,
        period: float,
        *,
        concurrency: int = 256,
        concurrency_per_fleet: int = 32,
        deadline: float = 2.0,
        keep: int = 256,
        keep_seconds: float = 90.0,
    ) -> None:
        self._deadline = min(deadline, period)
        self._keep, self._keep_seconds = keep, keep_seconds
        self._concurrency_per_fleet = concurrency_per_fleet
        self._places = asyncio.Semaphore(concurrency)
        self._places_of_slow = asyncio.Semaphore(max(1, int(concurrency * _SLOW_SHARE)))
        self._slow: dict[str, float] = {}  # until when, by fleet
        self._sizes: dict[str, tuple[int, float]] = {}  # number of replicas and time of the last scrape, by fleet

    async def __aenter__(self) -> Scraper:
        """Open the context in the event loop that scrapes."""
        self._session = aiohttp.ClientSession(
            # The semaphores limit the connections in use.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_seconds),
            timeout=aiohttp.ClientTimeout(total=self._deadline),
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._session.close()

    async def scrape(self, name: str, targets: Collection[Target]) -> dict[Target, Scraped]:
        """Scrape the metrics of the replicas of one fleet that the autoscaler needs: see `scrape_as`."""
        return await self.scrape_as(name, targets, QUERY, parse_sample)

    async def scrape_as(
        self, name: str, targets: Collection[Target], query: str, parse: _Parser[T]
    ) -> dict[Target, T | UnusableError]:
        """Scrape the replicas of one fleet.

        It takes at most ceil(replicas / concurrency_per_fleet) times the deadline, not counting parsing and waits for
        the requests of other fleets.

        Args:
            name: unique name of the fleet, by which earlier timeouts are remembered.
            targets: the replicas.
            query: selects the metrics.
            parse: reads them, and raises UnusableError: see `parse_sample`.
        """
        headers = {} if self._keeps(name, len(targets)) else {"Connection": "close"}
        places, seconds = asyncio.Semaphore(self._concurrency_per_fleet), _PARSING_SHARE * self._deadline
        fleet = _Fleet(places, headers, f"metrics?{query}", parse, seconds)
        is_slow = time.monotonic() < self._slow.get(name, 0.0)
        answers: list[T | UnusableError]
        answers = await asyncio.gather(*(self._answer(fleet, target, is_slow=is_slow) for target in targets))
        if any(isinstance(answer, UnusableError) and answer.reason == "TimedOut" for answer in answers):
            self._slow[name] = time.monotonic() + _SLOW_SECONDS
        return dict(zip(targets, answers, strict=True))

    async def read_stage(self, address: str, port: int = HTTP_PORT) -> str:
        """Return the loading stage of the engine at an address; empty if it reports none.

        Its percentage is rounded down to a multiple of ten. The request is not urgent, so it shares the places of
        fleets with recent timeouts.
        """
        async with self._places_of_slow, self._places:
            try:
                url = _url(address, port, "ready")
                async with self._session.get(url, headers={"Connection": "close"}, allow_redirects=False) as response:
                    return _stage(await _body(response, _STAGE_BYTES)) if response.status == 503 else ""
            except Exception:
                # The engine does not listen yet, or the pod runs something else.
                return ""

    async def read_model(self, address: str, revision: str, port: int = HTTP_PORT) -> ServedModel | None:
        """Return what the ready engine at an address, of a revision, says about its model; None without an answer.

        The request is not urgent either.
        """
        async with self._places_of_slow, self._places:
            try:
                body = await self.read(address, port, "ready", _STAGE_BYTES, {"Connection": "close"})
            except Exception:
                return None
            return ServedModel.parse(revision, body)

    def _keeps(self, name: str, size: int) -> bool:
        """Record the size of a fleet; return whether all fleets together have at most `keep` replicas."""
        now = time.monotonic()
        self._slow = {fleet: until for fleet, until in self._slow.items() if until > now}
        self._sizes[name] = size, now
        if self._num_replicas > self._keep:  # fleets that are gone may be among them
            self._sizes = {fleet: (n, at) for fleet, (n, at) in self._sizes.items() if now - at < self._keep_seconds}
        return self._num_replicas <= self._keep

    @property
    def _num_replicas(self) -> int:
        return sum(number for number, _ in self._sizes.values())

    async def _answer(self, fleet: _Fleet[Any], target: Target, *, is_slow: bool) -> Any:
        async with AsyncExitStack() as places:
            await places.enter_async_context(fleet.places)
            if is_slow:
                await places.enter_async_context(self._places_of_slow)
            await places.enter_async_context(self._places)
            try:
                body = await self.read(target.address, target.port, fleet.path, _LIMIT_BYTES, fleet.headers)
                return fleet.read(body, target.model_name)
            except UnusableError as error:
                return error
            except Exception as error:
                # Whatever a replica sends, the others are read.
                return UnusableError("NotMetrics", f"{type(error).__name__}: {error}")

    async def read(
        self, address: str, port: int, path: str, limit: int, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the body of a response of at most `limit` bytes.

        Raises:
            UnusableError: there is no such response within the deadline.
        """
        try:
            url = _url(address, port, path)
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise UnusableError("BadStatus", f"HTTP {response.status}")
                return await _body(response, limit)
        except TimeoutError as error:
            raise UnusableError("TimedOut", f"no response within {self._deadline:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnusableError("Unreachable", str(error) or type(error).__name__) from error


def _url(address: str, port: int, path: str) -> URL:
    host = f"[{address}]" if ":" in address else address
    return URL(f"http://{host}:{port}/{path}", encoded=True)


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of a response of at most `limit` bytes."""
    try:
        await response.content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    raise UnusableError("TooLarge", f"the response exceeds {limit >> 10} KiB")


def _stage(body: bytes) -> str:
    """Return the stage in the body of a response of `/ready`, else an empty text.

    Each percent would be one more write of the status, so the percentage is rounded down to a multiple of ten.
    """
    status = json.loads(body).get("status")
    found = _STAGE.fullmatch(status) if isinstance(status, str) else None
    return "" if found is None else f"{found[1]} {min(int(found[2]), 100) // 10 * 10} %"


@dataclass(slots=True)
class _Fleet(Generic[T]):
    """The scrape of one fleet.

    Attributes:
        places: for its requests.
        headers, path: of its requests.
        parse: reads a response.
        seconds: that parsing its responses may still take.
    """

    places: asyncio.Semaphore
    headers: Mapping[str, str]
    path: str
    parse: _Parser[T]
    seconds: float

    def read(self, body: bytes, model_name: str) -> T:
        if self.seconds <= 0:
            raise UnusableError("TimedOut", "the metrics of the fleet's replicas take too long to parse")
        began = time.monotonic()
        try:
            return self.parse(body.decode(errors="replace"), model_name, began)
        finally:
            self.seconds -= time.monotonic() - began
