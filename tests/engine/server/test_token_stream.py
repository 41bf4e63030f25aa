"""What a streamed response writes to its connection, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from engine.server.test_request_handler import PlayedEngine, handler_of
from fastgen.core.request import FinishReason
from fastgen.server.http.api_error import APIError
from fastgen.server.http.connection import BODY_WRITER
from fastgen.server.http.request_context import RequestContext, _current
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.request_output import OutputDelta
from support.waiting import HANG_SECONDS


class Texts:
    """Writes deltas as `index:text;`."""

    def begin(self) -> bytes:
        return b"<"

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        return f"{index}:{delta.text};".encode()

    def end(self) -> bytes:
        return b">"

    def fail(self, error: APIError) -> bytes:
        return error.code.encode()


class Broken(Texts):
    def delta(self, index: int, delta: OutputDelta) -> bytes:
        raise KeyError(index, delta)


class Client:
    """Records the parts written; reads unless told otherwise."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_blocked = False
        self._callback: Callable[[], object] | None = None
        self._reads = asyncio.Event()
        self._reads.set()

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback

    def write(self, part: bytes) -> None:
        assert not self.is_blocked
        self.parts.append(part)

    async def drain(self) -> None:
        await self._reads.wait()

    def stop_reading(self) -> None:
        self.is_blocked = True
        self._reads.clear()

    def go_on_reading(self) -> None:
        self.is_blocked = False
        self._reads.set()
        if self._callback is not None:
            self._callback()

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message["body"])


async def responding(engine: PlayedEngine, client: Client, events: Texts, num: int = 1) -> asyncio.Task[None]:
    _current.set(RequestContext("1"))
    stream = TokenStream(handler_of(engine, num=num), events)
    scope = {"extensions": {BODY_WRITER: client}}
    task = asyncio.create_task(stream(scope, cast(Any, client.receive), client.send))
    await settle()
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_outputs_of_a_step_are_written_in_one_piece() -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Texts(), num=3)
    for _ in range(2):
        for index in (2, 0, 1):
            engine.generate("a", request_id=str(index))
        assert len(client.parts) < 4, "not written while the report is handled"
        await settle()
    assert client.parts == [b"<", b"2:a;0:a;1:a;", b"2:a;0:a;1:a;"]
    for index in range(3):
        engine.generate("b", request_id=str(index), end=FinishReason.LENGTH)
    await task
    assert client.parts[3:] == [b"0:b;1:b;2:b;>"], "the last deltas and the end, too"


async def test_nothing_is_written_to_a_client_that_does_not_read() -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Texts())
    client.stop_reading()
    for letter in "abc":
        engine.generate(letter)
        await settle()
    assert client.parts == [b"<"]
    client.go_on_reading()
    assert client.parts == [b"<", b"0:abc;"], "what has accumulated is one delta"
    client.stop_reading()
    engine.generate("d")
    engine.generate("e", end=FinishReason.LENGTH)
    await settle()
    assert not task.done()
    client.go_on_reading()
    await task
    assert b"".join(client.parts) == b"<0:abc;0:de;>"


async def test_much_that_has_accumulated_is_written_in_parts_between_which_others_have_their_turn() -> None:
    engine, client, turns = PlayedEngine(), Client(), list[int]()
    task = await responding(engine, client, Texts())

    async def other() -> None:
        while not task.done():
            turns.append(len(client.parts))
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    for number in range(2):  # while it runs, and at its end
        client.stop_reading()
        for _ in range(5000):
            engine.generate("a")
        if number:
            engine.generate("b", end=FinishReason.LENGTH)
        await settle()
        client.go_on_reading()
        while not (task.done() if number else b"".join(client.parts).count(b"a") == 5000):
            await asyncio.sleep(0)
    await watching
    texts = b"".join(client.parts).decode().strip("<>").replace("0:", "").split(";")
    assert "".join(texts) == "a" * 10_000 + "b"
    assert max(map(len, texts)) == 1024
    assert all(second - first <= 1 for first, second in pairwise(turns)), "a turn between two parts"


async def test_a_client_that_pauses_between_the_parts_gets_them_all() -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Texts())
    client.stop_reading()
    for _ in range(5000):
        engine.generate("a")
    client.go_on_reading()
    client.stop_reading()
    await settle()
    assert b"".join(client.parts) == b"<0:" + b"a" * 1024 + b";"
    client.go_on_reading()
    await settle()
    client.stop_reading()
    engine.in_flight.end_all()
    await settle()
    client.go_on_reading()
    await task
    assert b"".join(client.parts).count(b"a") == 5000 + b"engine_dead".count(b"a")


async def test_much_that_cannot_be_encoded_ends_the_request() -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Broken())
    client.stop_reading()
    for _ in range(5000):
        engine.generate("a")
    client.go_on_reading()
    await asyncio.wait_for(task, HANG_SECONDS)
    assert b"".join(client.parts) == b"<internal_error"


async def test_a_request_that_fails_gets_its_text_before_the_error() -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Texts())
    engine.generate("a")
    engine.in_flight.end_all()
    await task
    assert b"".join(client.parts) == b"<0:a;engine_dead"


async def test_a_delta_that_cannot_be_encoded_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    engine, client = PlayedEngine(), Client()
    task = await responding(engine, client, Broken())
    engine.generate("a")
    await asyncio.wait_for(task, HANG_SECONDS)
    assert b"".join(client.parts) == b"<internal_error"
    assert "KeyError" in caplog.text
    assert engine.cancelled == ["0"]
