"""Server-sent events on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from fastgen.server.http.api_error import APIError
from fastgen.server.http.connection import BODY_WRITER
from fastgen.server.http.sse import KEEP_ALIVE, EventTemplate, GeneratedEvents, event
from fastgen.server.openai.response_bodies import ChatChunk, ChatChunkChoice, Delta
from support.waiting import HANG_SECONDS


class QuickToKeepAlive(GeneratedEvents):
    keep_alive_seconds = 0.02


class Wire:
    """The server's side of a connection: the parts of the body, and the client's reading and disconnect."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.has_ended = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def scope(self) -> dict[str, Any]:
        return {"extensions": {BODY_WRITER: self}}

    @property
    def is_blocked(self) -> bool:
        return not self.reads.is_set()

    def write(self, part: bytes) -> None:
        self.bodies.append(part)
        self._changed.set()

    async def drain(self) -> None:
        await self.reads.wait()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            assert not self.has_ended
            self.has_ended = not message["more_body"]
            self.bodies += filter(None, [message["body"]])

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def wait_for(self, body: bytes, count: int = 1) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while self.bodies.count(body) < count:
                self._changed.clear()
                await self._changed.wait()


async def test_comments_are_sent_during_silence_before_and_between_events() -> None:
    wire, go_on = Wire(), [asyncio.Event(), asyncio.Event()]

    async def events() -> AsyncGenerator[bytes]:
        await go_on[0].wait()
        yield b"data: 1\n\n"
        await go_on[1].wait()
        yield b"data: 2\n\n"

    responding = asyncio.create_task(QuickToKeepAlive(events())(wire.scope, wire.receive, wire.send))
    await wire.wait_for(KEEP_ALIVE, 2)
    go_on[0].set()
    await wire.wait_for(b"data: 1\n\n")
    await wire.wait_for(KEEP_ALIVE, wire.bodies.count(KEEP_ALIVE) + 1)
    go_on[1].set()
    await responding
    assert [body for body in wire.bodies if body != KEEP_ALIVE] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert wire.has_ended
    assert wire.bodies[0] == KEEP_ALIVE


async def test_a_disconnect_closes_the_event_generator() -> None:
    wire, closed = Wire(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    responding = asyncio.create_task(GeneratedEvents(events())(wire.scope, wire.receive, wire.send))
    await wire.wait_for(b"data: 1\n\n")
    wire.gone.set()
    await responding
    assert closed.is_set()
    assert not wire.has_ended


async def test_an_error_is_sent_as_the_last_event() -> None:
    wire = Wire()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise APIError(500, "broken", code="engine_dead")

    await GeneratedEvents(events())(wire.scope, wire.receive, wire.send)
    assert wire.bodies[1].startswith(b'data: {"error":{"message":"broken"')
    assert wire.has_ended


async def test_an_unexpected_exception_is_propagated() -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise KeyError("a defect")

    wire = Wire()
    with pytest.raises(KeyError):
        await GeneratedEvents(events())(wire.scope, wire.receive, wire.send)
    assert not wire.has_ended


async def test_no_comments_are_sent_while_a_client_does_not_read() -> None:
    wire = Wire()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"

    wire.reads.clear()
    responding = asyncio.create_task(QuickToKeepAlive(events())(wire.scope, wire.receive, wire.send))
    done, _ = await asyncio.wait((responding,), timeout=0.1)
    assert not done
    assert wire.bodies == [b"data: 1\n\n"]
    wire.reads.set()
    await responding
    assert wire.has_ended


@pytest.mark.parametrize("text", [" a", '"\\', "\0", "Zürich \U0001f642\n", '"\\u0000"', "\x7f\u2028</script>"])
@pytest.mark.parametrize("request_id", ["1", '"\\u0000"'])
def test_a_template_encodes_as_the_whole_body_would(text: str, request_id: str) -> None:
    def chunk(text: str) -> ChatChunk:
        return ChatChunk(request_id, 1, "m", [ChatChunkChoice(0, Delta(content=text), None)])

    assert EventTemplate(chunk).event(text) == event(chunk(text))
