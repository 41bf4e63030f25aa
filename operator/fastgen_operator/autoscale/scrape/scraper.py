"""Scrape the metrics of many replicas over kept connections.

`Scraper.scrape` returns errors instead of raising them. The caller's thread serves all requests in flight: it waits for
their sockets with `selectors`. See docs/decisions/036-scrapes-over-sockets.md.
"""

from __future__ import annotations

import selectors
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import Final

from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.autoscale.scrape.connection import Connection, StaleConnectionError
from fastgen_operator.autoscale.scrape.exposition import QUERY, UnusableError, parse_sample
from fastgen_operator.children.metadata import HTTP_PORT

# A response has 3 KiB, or 30 KiB if the engine ignores the query.
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape: pod, IP address, and the model name that its metrics must have."""

    pod: str
    address: str
    model_name: str
    port: int = HTTP_PORT


Answer = Sample | UnusableError


class Scraper(AbstractContextManager["Scraper"]):
    """Scrapes many replicas concurrently. Thread-safe; leaving the context closes connections.

    Args:
        period: scrape interval in seconds. It caps `deadline`, so that a hanging replica does not make others stale.
        concurrency: maximum number of concurrent requests of one call.
        deadline: timeout for one replica in seconds, connecting included.
        keep: maximum number of connections to keep for the next scrape. Each is an open file.
        keep_seconds: idle time after which a connection is closed. Engines close theirs after 75 s, so only
            connections to engines that vanished reach the default.
    """

    def __init__(
        self,
        period: float,
        *,
        concurrency: int = 100,
        deadline: float = 2.0,
        keep: int = 256,
        keep_seconds: float = 90.0,
    ) -> None:
        self.concurrency, self.deadline = concurrency, min(deadline, period)
        self._keep, self._keep_seconds = keep, keep_seconds
        self._lock = Lock()
        # In the order of their last use, with its time.
        self._kept: OrderedDict[Target, tuple[float, Connection]] = OrderedDict()
        self.is_closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calls of `scrape` in other threads return within one deadline."""
        with self._lock:
            self.is_closed = True
        self._close_unused(time.monotonic())

    def scrape(self, targets: Iterable[Target]) -> dict[Target, Answer]:
        """Scrape all targets. Takes at most ceil(targets / concurrency) times the deadline."""
        self._close_unused(time.monotonic() - self._keep_seconds)
        return _Round(self).run(targets)

    def take(self, target: Target) -> Connection | None:
        """Return the kept connection to a replica, if it still can be used, and stop keeping it."""
        with self._lock:
            _, connection = self._kept.pop(target, (0.0, None))
        if connection is not None and not connection.is_silent():
            connection.close()
            return None
        return connection

    def put(self, target: Target, connection: Connection) -> None:
        """Keep a connection whose request has ended, or close it."""
        with self._lock:
            has_room = len(self._kept) < self._keep and target not in self._kept
            if connection.is_open and has_room and not self.is_closed:
                self._kept[target] = time.monotonic(), connection
            else:
                connection.close()

    def _close_unused(self, since: float) -> None:
        """Close the connections that were last used at `since` or before."""
        with self._lock:
            while self._kept and next(iter(self._kept.values()))[0] <= since:
                self._kept.popitem(last=False)[1][1].close()


@dataclass(slots=True, eq=False)
class _Flight:
    """A request in flight, sent once more if its connection was kept and is stale."""

    target: Target
    deadline: float
    connection: Connection
    was_kept: bool


class _Round:
    """One call of `Scraper.scrape`: the requests in flight, and the answers so far."""

    def __init__(self, scraper: Scraper) -> None:
        self._scraper = scraper
        self._selector = selectors.DefaultSelector()
        self._flights: set[_Flight] = set()
        self._found: dict[Target, Answer] = {}

    def run(self, targets: Iterable[Target]) -> dict[Target, Answer]:
        """Scrape the targets, until the scraper is closed."""
        waiting = iter(tuple(targets))
        try:
            while not self._scraper.is_closed:
                begun = list(islice(waiting, self._scraper.concurrency - len(self._flights)))
                for target in begun:
                    self._begin(target)
                if self._flights:
                    self._wait()
                elif not begun:
                    break
            return self._found
        finally:
            for flight in self._flights:
                flight.connection.close()
            self._selector.close()

    def _wait(self) -> None:
        """Handle the next events of requests in flight, and end requests past their deadline."""
        first = min(flight.deadline for flight in self._flights)
        for key, _ in self._selector.select(max(0.0, first - time.monotonic())):
            self._advance(key.data)
        if (now := time.monotonic()) >= first:
            late = UnusableError("TimedOut", f"no response within {self._scraper.deadline:g} s")
            for flight in [each for each in self._flights if each.deadline <= now]:
                self._end(flight, late)

    def _begin(self, target: Target) -> None:
        deadline = time.monotonic() + self._scraper.deadline
        if (kept := self._scraper.take(target)) is None:
            self._connect(target, deadline)
        else:
            self._send(_Flight(target, deadline, kept, was_kept=True))

    def _connect(self, target: Target, deadline: float) -> None:
        try:
            connection = Connection(target.address, target.port, _LIMIT_BYTES)
        except OSError as error:
            self._found[target] = _unreachable(error)
        else:
            self._send(_Flight(target, deadline, connection, was_kept=False))

    def _send(self, flight: _Flight) -> None:
        flight.connection.begin(_request(flight.target.address, flight.target.port))
        self._flights.add(flight)
        self._selector.register(flight.connection, flight.connection.events, flight)

    def _advance(self, flight: _Flight) -> None:
        """Send or receive what is possible now, and parse a complete response."""
        connection, events = flight.connection, flight.connection.events
        try:
            response = connection.advance()
            if response is not None:
                self._end(flight, _sample(*response, flight.target.model_name))
            elif connection.events != events:
                self._selector.modify(connection, connection.events, flight)
        except UnusableError as error:
            self._end(flight, error)
        except OSError as error:
            self._end(flight, _unreachable(error))
            if flight.was_kept and isinstance(error, StaleConnectionError):
                # The engine closed the connection at the moment of the request.
                self._connect(flight.target, flight.deadline)

    def _end(self, flight: _Flight, answer: Answer) -> None:
        self._flights.discard(flight)
        self._selector.unregister(flight.connection)
        if flight.connection.is_waiting:
            flight.connection.close()
        self._scraper.put(flight.target, flight.connection)
        self._found[flight.target] = answer


def _unreachable(error: OSError) -> UnusableError:
    return UnusableError("Unreachable", str(error) or type(error).__name__)


def _sample(status: int, body: bytes, model_name: str) -> Sample:
    if status != 200:
        raise UnusableError("BadStatus", f"HTTP {status}")
    return parse_sample(body.decode(errors="replace"), model_name, time.monotonic())


@lru_cache(maxsize=20_000)
def _request(address: str, port: int) -> bytes:
    """Return the request for the metrics of `Sample`."""
    host = f"[{address}]" if ":" in address else address
    head = (
        f"GET /metrics?{QUERY} HTTP/1.1",
        f"Host: {host}:{port}",
        "Accept: text/plain;version=0.0.4",
        "Accept-Encoding: identity",
    )
    return "\r\n".join((*head, "\r\n")).encode()
