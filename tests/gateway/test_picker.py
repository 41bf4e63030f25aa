"""What the picker does with one request: every request that it begins ends, whatever happens."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

from fastgen_gateway.ext_proc.holding import Holding, Outcome
from fastgen_gateway.ext_proc.incoming_bodies import Incoming, IncomingBodies
from fastgen_gateway.ext_proc.picker import Picker
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.access import Access, Clients
from fastgen_gateway.routing.client import Client, ClientTable
from fastgen_gateway.routing.held_requests import Held, HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_gateway.routing.router import Router

KEY = ("default", "m")
CLIENT = Client("c", tokens_per_minute=1000, concurrent_requests=1)


def request_headers() -> ProcessingRequest:
    given = {":method": "POST", ":path": "/v1/completions", "authorization": "Bearer k"}
    headers = HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in given.items()])
    return ProcessingRequest(request_headers=HttpHeaders(headers=headers))


def request_body(text: bytes = b'{"model":"m","prompt":"hello"}') -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=text, end_of_stream=True))


class Stream:
    """Envoy's side: gives messages and ends some seconds later, and takes answers.

    `fails` raises an error for one of them.
    """

    def __init__(
        self,
        *given: ProcessingRequest,
        fails: Callable[[ProcessingResponse], None] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._given = list(given)
        self._fails = fails
        self._seconds = seconds
        self.answers: list[ProcessingResponse] = []

    async def read(self) -> Any:
        if self._given:
            return self._given.pop(0)
        await asyncio.sleep(self._seconds)
        return grpc.aio.EOF

    def invocation_metadata(self) -> None:
        return None

    async def write(self, message: ProcessingResponse) -> None:
        if self._fails is not None:
            self._fails(message)
        self.answers.append(message)


class Bench:
    """A picker with one model and one client, and a clock that the test sets."""

    def __init__(self, *addresses: str) -> None:
        self.now = 100.0
        self.router = Router(lambda: self.now, HoldLimits(seconds=60))
        self.router.set_deployments([Exposed(*KEY, "m", "2026-01-01T00:00:00Z")])
        self.router.set_endpoints(KEY, addresses)
        self.access = Access(lambda: self.now)
        self.access.set_clients(Clients(ClientTable([("k", CLIENT)]), {}))
        self.metrics = Metrics(self.router, self.access.limits)
        self.holding = Holding(self.router)
        self.picker = Picker(self.router, self.access, self.holding, 60, 60, IncomingBodies(40 << 20), self.metrics)

    async def process(self, stream: Stream) -> None:
        await self.picker.Process(None, stream)  # type: ignore[arg-type]  # the picker reads from the stream itself

    def counted(self) -> tuple[int, int, int, int]:
        """Return what is held (of the model, and of all), what runs, and the requests of the client."""
        demand = self.router.demand()["deployments"]["default/m"]
        return (
            demand["held"],
            self.router.held.total.requests,
            demand["running"],
            self.access.limits.num_requests()["c"],
        )


def fail(*_: object) -> None:
    raise RuntimeError("a fault of the test")


@pytest.mark.parametrize(
    "broken",
    ["ext_proc.picker.with_fields", "routing.router.ranked", "metrics.Metrics.routed", "ext_proc.messages.destination"],
)
def test_a_request_ends_whatever_fails(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(f"fastgen_gateway.{broken}", fail)
    bench = Bench("10.0.0.1:8000")
    with pytest.raises(RuntimeError, match="a fault of the test"):
        asyncio.run(bench.process(Stream(request_headers(), request_body())))
    assert bench.counted() == (0, 0, 0, 0)


def fail_more_time(answer: ProcessingResponse) -> None:
    """Fail as a write does whose client has reset the connection."""
    if answer.HasField("override_message_timeout"):
        raise asyncio.CancelledError


def test_a_held_request_ends_if_its_client_leaves_before_envoy_waits() -> None:
    bench = Bench()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bench.process(Stream(request_headers(), request_body(), fails=fail_more_time)))
    assert bench.counted() == (0, 0, 0, 0)


def test_a_request_that_is_released_before_envoy_waits_ends_if_its_client_leaves_then() -> None:
    bench = Bench()

    def release_and_fail(answer: ProcessingResponse) -> None:
        if answer.HasField("override_message_timeout"):
            bench.router.set_endpoints(KEY, ["10.0.0.1:8000"])
            bench.holding.release()
            assert bench.counted() == (0, 0, 1, 1)
        fail_more_time(answer)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bench.process(Stream(request_headers(), request_body(), fails=release_and_fail)))
    assert bench.counted() == (0, 0, 0, 0)


def test_a_request_whose_body_has_arrived_may_take_longer_than_a_body() -> None:
    bench = Bench("10.0.0.1:8000")
    bench.picker.body_seconds = 0.01
    stream = Stream(request_headers(), request_body(), seconds=0.1)
    asyncio.run(bench.process(stream))
    assert not any(answer.HasField("immediate_response") for answer in stream.answers)


def test_a_request_whose_body_does_not_arrive_is_refused() -> None:
    bench = Bench("10.0.0.1:8000")
    bench.picker.body_seconds = 0.01
    stream = Stream(request_headers(), seconds=60)
    asyncio.run(bench.process(stream))
    assert stream.answers[-1].immediate_response.status.code == 408
    assert bench.counted() == (0, 0, 0, 0)


class _Text(bytes):
    """A body that tells when it is gone."""

    num_alive = 0

    def __init__(self, _: bytes) -> None:
        _Text.num_alive += 1

    def __del__(self) -> None:
        _Text.num_alive -= 1


@dataclass
class _Body:
    body: bytes


@dataclass
class _Message:
    request_body: _Body

    def WhichOneof(self, _: str) -> str:
        return "request_body"


def test_a_held_request_keeps_no_body() -> None:
    bench, left = Bench(), list[int]()

    def look(answer: ProcessingResponse) -> None:
        if answer.HasField("override_message_timeout"):
            gc.collect()
            left.append(_Text.num_alive)
            assert bench.picker.bodies.num_bytes == 0, "it counts as held"

    message: Any = _Message(_Body(_Text(b'{"model":"m","prompt":"hello"}')))
    stream = Stream(request_headers(), message, fails=look)
    del message
    asyncio.run(bench.process(stream))
    assert left == [0]


@pytest.mark.parametrize("addresses", [["10.0.0.1:8000"], []], ids=["sent", "held"])
def test_a_body_counts_until_it_was_read(addresses: list[str]) -> None:
    bench, counted = Bench(*addresses), list[int]()
    stream = Stream(request_headers(), request_body(), fails=lambda _: counted.append(bench.picker.bodies.num_bytes))
    asyncio.run(bench.process(stream))
    assert counted[0] == 17 << 20, "it may be as large as any"
    assert bench.picker.bodies.num_bytes == 0


@pytest.mark.parametrize("given", ["-1", "1e3", "x", "", "9" * 5000, str(99 << 20), None])
def test_a_body_of_unknown_length_counts_as_the_largest(given: str | None) -> None:
    assert IncomingBodies(17 << 20).begin(given) == Incoming(17 << 20, "")
    assert isinstance(IncomingBodies(16 << 20).begin(given), Refusal)


def test_small_bodies_are_received_whatever_is_on_its_way() -> None:
    bodies = IncomingBodies(1 << 20)
    large = bodies.begin(str(1 << 20))
    assert large == Incoming(1 << 20, "")
    assert bodies.begin("65536") == Incoming(0, "")
    assert isinstance(bodies.begin("65537"), Refusal)
    bodies.end(large)
    assert bodies.begin("65537") == Incoming(65537, "")


def test_clients_leave_room_for_the_bodies_of_others() -> None:
    bodies = IncomingBodies(12 << 20)
    begun = {name: [bodies.begin(str(1 << 20), name) for _ in range(12)] for name in "abc"}
    counts = {name: sum(isinstance(each, Incoming) for each in found) for name, found in begun.items()}
    assert counts == {"a": 6, "b": 3, "c": 2}
    for each in (each for found in begun.values() for each in found):
        if isinstance(each, Incoming):
            bodies.end(each)
    assert bodies.num_bytes == 0


def test_a_held_request_for_which_nobody_waits_expires() -> None:
    bench = Bench()
    parsed = RequestBody("m", 100, 10, ())
    assert isinstance(bench.router.arrive(parsed), Held)
    bench.now += 60
    bench.holding.release()
    assert bench.counted() == (0, 0, 0, 0)


async def test_a_displaced_request_gets_its_error_although_all_others_have_left() -> None:
    router = Router(lambda: 0.0, HoldLimits(requests=2))
    router.set_deployments([Exposed("default", name, name, "2026-01-01T00:00:00Z") for name in "mn"])
    holding = Holding(router)

    def hold(model: str) -> tuple[Held, asyncio.Future[Outcome]]:
        held = router.arrive(RequestBody(model, 100, 10, ()))
        assert isinstance(held, Held)
        return held, holding.outcome(held)

    (first, _), (_, displaced), (other, _) = hold("m"), hold("m"), hold("n")
    holding.abandon(first)
    holding.abandon(other)
    assert router.held.total.requests == 0
    holding.release()
    refusal = displaced.result()
    assert isinstance(refusal, Refusal)
    assert refusal.code == "held_requests_full"


def test_a_client_pays_once_if_envoy_asks_again() -> None:
    """Envoy ends the first exchange if the picker's answer comes too late."""
    bench = Bench("10.0.0.1:8000")
    asyncio.run(bench.process(Stream(request_headers(), request_body())))
    assert bench.access.limits.admit(CLIENT, 1000) == 1000
    bench.access.limits.end(CLIENT)
    bench.now += 60
    answered = ProcessingRequest(response_headers=HttpHeaders())
    asyncio.run(bench.process(Stream(request_headers(), request_body(), answered)))
    assert isinstance(bench.access.limits.admit(CLIENT, 1000), Refusal)


def test_the_body_of_a_request_beyond_the_limits_is_not_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen_gateway.ext_proc.picker.with_fields", fail)
    bench = Bench("10.0.0.1:8000")
    assert bench.access.limits.admit(CLIENT, 1) == 1
    unknown = request_body(b'{"model":"none"}')
    for status, body in ((429, request_body()), (404, unknown)):
        stream = Stream(request_headers(), body)
        asyncio.run(bench.process(stream))
        assert stream.answers[-1].immediate_response.status.code == status
        bench.access.limits.end(CLIENT)
