"""Server-sent events on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import DONE, KEEP_ALIVE, EventStream


class QuickToKeepAlive(EventStream):
    keep_alive_seconds = 0.02


class Wire:
    """The server's side of a connection: messages sent, and the client's disconnect."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.sent = asyncio.Condition()
        self.gone = asyncio.Event()

    async def send(self, message: Message) -> None:
        async with self.sent:
            self.messages.append(message)
            self.sent.notify_all()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    async def wait_for(self, body: bytes, count: int = 1) -> None:
        async with self.sent:
            await asyncio.wait_for(self.sent.wait_for(lambda: self.bodies().count(body) >= count), 10)


async def test_comments_are_sent_during_silence_before_and_between_events() -> None:
    wire, go_on = Wire(), [asyncio.Event(), asyncio.Event()]

    async def events() -> AsyncGenerator[bytes]:
        await go_on[0].wait()
        yield b"data: 1\n\n"
        await go_on[1].wait()
        yield b"data: 2\n\n"

    responding = asyncio.create_task(QuickToKeepAlive(events())({}, wire.receive, wire.send))
    await wire.wait_for(KEEP_ALIVE, 2)
    go_on[0].set()
    await wire.wait_for(b"data: 1\n\n")
    await wire.wait_for(KEEP_ALIVE, wire.bodies().count(KEEP_ALIVE) + 1)
    go_on[1].set()
    await responding
    assert [body for body in wire.bodies() if body != KEEP_ALIVE] == [b"data: 1\n\n", b"data: 2\n\n", DONE]
    assert [message["more_body"] for message in wire.messages[1:]][-2:] == [True, False]
    assert wire.bodies()[0] == KEEP_ALIVE


async def test_a_disconnect_closes_the_event_generator() -> None:
    wire, closed = Wire(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    responding = asyncio.create_task(EventStream(events())({}, wire.receive, wire.send))
    await wire.wait_for(b"data: 1\n\n")
    wire.gone.set()
    await responding
    assert closed.is_set()
    assert DONE not in wire.bodies()


async def test_an_error_is_sent_as_the_last_event_before_done() -> None:
    wire = Wire()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise APIError(500, "broken", code="engine_dead")

    await EventStream(events())({}, wire.receive, wire.send)
    assert wire.bodies()[1].startswith(b'data: {"error":{"message":"broken"')
    assert wire.bodies()[2] == DONE


async def test_an_unexpected_exception_is_propagated() -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise KeyError("a defect")

    wire = Wire()
    with pytest.raises(KeyError):
        await EventStream(events())({}, wire.receive, wire.send)
    assert DONE not in wire.bodies()


async def test_no_comments_are_sent_while_a_client_does_not_read() -> None:
    wire, reads = Wire(), asyncio.Event()

    async def send(message: Message) -> None:
        if message.get("body") == b"data: 1\n\n":
            await reads.wait()
        await wire.send(message)

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"

    responding = asyncio.create_task(QuickToKeepAlive(events())({}, wire.receive, send))
    done, _ = await asyncio.wait((responding,), timeout=0.1)
    assert not done
    reads.set()
    await responding
    assert wire.bodies() == [b"data: 1\n\n", DONE]
