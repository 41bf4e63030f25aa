"""Scrape the metrics of many fleets over kept connections.

One thread serves all requests in flight: it waits for their sockets with `selectors`. A fleet never waits for another
one: each has a future of its own, requests begin in turn, and a fleet that hangs or floods gets fewer of them. See
docs/decisions/036-scrapes-over-sockets.md.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock, Thread
from typing import Final

from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.autoscale.scrape.connection import Connection, StaleConnectionError
from fastgen_operator.autoscale.scrape.exposition import QUERY, UnusableError, parse_sample
from fastgen_operator.children.metadata import HTTP_PORT

logger = logging.getLogger(__name__)

# A response has 3 KiB, or 30 KiB if the engine ignores the query.
_LIMIT_BYTES: Final = 1 << 18
# Share of the deadline that receiving and parsing all responses of a fleet may take of the thread's time. A thousand
# replicas take 5 %.
_WORK_SHARE: Final = 0.25
# Share of the requests in flight for all fleets together in which a replica has timed out lately, and how long that is.
_SLOW_SHARE: Final = 0.5
_SLOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape: pod, IP address, and the model name that its metrics must have."""

    pod: str
    address: str
    model_name: str
    port: int = HTTP_PORT


Answer = Sample | UnusableError


class Scraper(AbstractContextManager["Scraper"]):
    """Scrapes many fleets concurrently. Thread-safe; leaving the context closes connections.

    Args:
        period: scrape interval in seconds. It caps `deadline`, so that a hanging replica does not make others stale.
        concurrency: maximum number of requests in flight.
        concurrency_per_fleet: maximum number of requests in flight to the replicas of one fleet.
        deadline: timeout for one replica in seconds, from connecting to the end of parsing.
        keep: maximum number of connections to keep for the next scrape. Each is an open file.
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
        self._concurrency, self._concurrency_per_fleet = concurrency, concurrency_per_fleet
        self._deadline = min(deadline, period)
        self._kept = _KeptConnections(keep, keep_seconds)
        self._lock = Lock()
        self._thread: Thread | None = None
        self._is_closed = False
        # Written under the lock; the bytes wake the thread.
        self._submitted: list[_Fleet] = []
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._wakes.setblocking(False)
        # Only the thread uses these. Flights are in the order of their deadlines.
        self._selector = selectors.DefaultSelector()
        self._flights: dict[_Flight, None] = {}
        self._fleets: deque[_Fleet] = deque()
        self._slow: dict[str, float] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Running scrapes end with the answers that they have."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            thread = self._thread
        self._wake()
        if thread is not None:
            thread.join()
        self._kept.close_all()
        self._selector.close()
        self._waker.close()
        self._wakes.close()

    def submit(self, name: str, targets: Iterable[Target]) -> Future[dict[Target, Answer]]:
        """Begin to scrape the replicas of one fleet.

        It takes at most ceil(replicas / concurrency_per_fleet) times the deadline, once its requests have begun.

        Args:
            name: unique name of the fleet, by which earlier timeouts are remembered.
        """
        fleet = _Fleet(name, deque(targets))
        fleet.future.set_running_or_notify_cancel()  # a waiting task that is cancelled leaves the future alone
        with self._lock:
            if self._is_closed:
                fleet.future.set_result({})
                return fleet.future
            self._submitted.append(fleet)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="scrape", daemon=True)
                self._thread.start()
        self._wake()
        return fleet.future

    def scrape(self, targets: Iterable[Target]) -> dict[Target, Answer]:
        """Scrape the replicas of one fleet, and wait for the answers."""
        return self.submit("", targets).result()

    def _wake(self) -> None:
        # A full buffer wakes the thread as well.
        with suppress(OSError):
            self._waker.send(b"w")

    def _run(self) -> None:
        self._selector.register(self._wakes, selectors.EVENT_READ)
        while not self._is_closed:
            try:
                self._step()
            except Exception:
                # An error here must not end autoscaling.
                logger.exception("scraping")
                self._abandon()
        self._abandon()

    def _step(self) -> None:
        self._kept.close_unused()
        with self._lock:
            submitted, self._submitted = self._submitted, []
        self._fleets.extend(submitted)
        for fleet in submitted:
            self._finish(fleet)
        self._begin_in_turn()
        self._wait()

    def _abandon(self) -> None:
        """End all running scrapes with the answers that they have."""
        with self._lock:
            fleets = {*self._submitted, *self._fleets, *(flight.fleet for flight in self._flights)}
            self._submitted = []
        for flight in list(self._flights):
            self._land(flight)
        self._fleets.clear()
        for fleet in fleets:
            if not fleet.future.done():
                fleet.future.set_result(fleet.found)

    def _begin_in_turn(self) -> None:
        """Begin requests, one of each fleet in turn, as far as they are allowed."""
        held = 0
        while held < len(self._fleets) and len(self._flights) < self._concurrency:
            fleet = self._fleets.popleft()
            if not fleet.waiting:
                continue  # given up
            if self._may_begin(fleet):
                held = 0
                self._begin(fleet, fleet.waiting.popleft())
            else:
                held += 1
            if fleet.waiting:
                self._fleets.append(fleet)

    def _may_begin(self, fleet: _Fleet) -> bool:
        is_slow = time.monotonic() < self._slow.get(fleet.name, 0.0)
        limit = self._concurrency * (_SLOW_SHARE if is_slow else 1)
        return fleet.num_flights < self._concurrency_per_fleet and len(self._flights) < limit

    def _wait(self) -> None:
        """Handle the next events of requests in flight, and end requests past their deadline."""
        first = next(iter(self._flights), None)
        timeout = None if first is None else max(0.0, first.deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with suppress(OSError):
                    self._wakes.recv(1 << 12)
            elif key.data in self._flights:
                self._advance(key.data)
        while (flight := next(iter(self._flights), None)) is not None and flight.deadline <= time.monotonic():
            self._end(flight, UnusableError("TimedOut", f"no response within {self._deadline:g} s"))

    def _begin(self, fleet: _Fleet, target: Target) -> None:
        deadline = time.monotonic() + self._deadline
        if (kept := self._kept.take(target)) is None:
            self._connect(fleet, target, deadline)
        else:
            self._send(_Flight(fleet, target, deadline, kept, was_kept=True))

    def _connect(self, fleet: _Fleet, target: Target, deadline: float) -> None:
        try:
            connection = Connection(target.address, target.port, _LIMIT_BYTES)
        except OSError as error:
            self._answer(fleet, target, _unreachable(error))
        else:
            self._send(_Flight(fleet, target, deadline, connection, was_kept=False))

    def _send(self, flight: _Flight) -> None:
        flight.connection.begin(_request(flight.target.address, flight.target.port))
        flight.fleet.num_flights += 1
        self._flights[flight] = None
        self._selector.register(flight.connection, flight.connection.events, flight)

    def _advance(self, flight: _Flight) -> None:
        """Send or receive what is possible now, and parse a complete response."""
        connection, events = flight.connection, flight.connection.events
        began = time.monotonic()
        try:
            response = connection.advance()
            if response is not None:
                sample = _sample(*response, flight.target.model_name)
                if time.monotonic() > flight.deadline:
                    raise UnusableError("TimedOut", f"the response was not read within {self._deadline:g} s")
                self._end(flight, sample)
            elif connection.events != events:
                self._selector.modify(connection, connection.events, flight)
        except UnusableError as error:
            self._end(flight, error)
        except OSError as error:
            if flight.was_kept and isinstance(error, StaleConnectionError):
                # The engine closed the connection at the moment of the request.
                self._land(flight)
                self._connect(flight.fleet, flight.target, flight.deadline)
            else:
                self._end(flight, _unreachable(error))
        except Exception as error:
            # Whatever a replica sends, the thread goes on.
            self._end(flight, UnusableError("NotMetrics", f"{type(error).__name__}: {error}"))
        flight.fleet.work_seconds += time.monotonic() - began
        if flight.fleet.work_seconds > _WORK_SHARE * self._deadline:
            self._give_up(flight.fleet)

    def _give_up(self, fleet: _Fleet) -> None:
        """End the scrape of a fleet whose responses take too long to read."""
        late = UnusableError("TimedOut", f"the fleet's metrics take over {_WORK_SHARE * self._deadline:g} s to read")
        for flight in [each for each in self._flights if each.fleet is fleet]:
            self._end(flight, late)
        for target in fleet.waiting:
            fleet.found[target] = late
        fleet.waiting.clear()
        self._finish(fleet)

    def _end(self, flight: _Flight, answer: Answer) -> None:
        self._land(flight)
        self._answer(flight.fleet, flight.target, answer)

    def _land(self, flight: _Flight) -> None:
        """Take the request out of those in flight, and keep its connection or close it."""
        del self._flights[flight]
        flight.fleet.num_flights -= 1
        self._selector.unregister(flight.connection)
        if flight.connection.is_waiting:
            flight.connection.close()
        self._kept.put(flight.target, flight.connection)

    def _answer(self, fleet: _Fleet, target: Target, answer: Answer) -> None:
        fleet.found[target] = answer
        self._finish(fleet)

    def _finish(self, fleet: _Fleet) -> None:
        """Complete the future of a fleet when all replicas have an answer."""
        if fleet.waiting or fleet.num_flights or fleet.future.done():
            return
        now = time.monotonic()
        if any(isinstance(each, UnusableError) and each.reason == "TimedOut" for each in fleet.found.values()):
            self._slow = {name: until for name, until in self._slow.items() if until > now}
            self._slow[fleet.name] = now + _SLOW_SECONDS
        fleet.future.set_result(fleet.found)


@dataclass(slots=True, eq=False)
class _Fleet:
    """The scrape of one fleet: replicas without a request yet, requests in flight, and the answers so far."""

    name: str
    waiting: deque[Target]
    found: dict[Target, Answer] = field(default_factory=dict)
    num_flights: int = 0
    work_seconds: float = 0.0
    future: Future[dict[Target, Answer]] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Flight:
    """A request in flight, sent once more if its connection was kept and is stale."""

    fleet: _Fleet
    target: Target
    deadline: float
    connection: Connection
    was_kept: bool


class _KeptConnections:
    """Connections between two requests, in the order of their last use, with its time."""

    def __init__(self, keep: int, keep_seconds: float) -> None:
        self._keep, self._keep_seconds = keep, keep_seconds
        self._kept: OrderedDict[Target, tuple[float, Connection]] = OrderedDict()

    def take(self, target: Target) -> Connection | None:
        """Return the kept connection to a replica, if it still can be used, and stop keeping it."""
        _, connection = self._kept.pop(target, (0.0, None))
        if connection is not None and not connection.is_silent():
            connection.close()
            return None
        return connection

    def put(self, target: Target, connection: Connection) -> None:
        """Keep a connection whose request has ended, or close it."""
        if connection.is_open and len(self._kept) < self._keep and target not in self._kept:
            self._kept[target] = time.monotonic(), connection
        else:
            connection.close()

    def close_unused(self) -> None:
        """Close the connections without a request for `keep_seconds`."""
        self._close(time.monotonic() - self._keep_seconds)

    def close_all(self) -> None:
        """Close all connections."""
        self._close(float("inf"))

    def _close(self, since: float) -> None:
        while self._kept and next(iter(self._kept.values()))[0] <= since:
            self._kept.popitem(last=False)[1][1].close()


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
