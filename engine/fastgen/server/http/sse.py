"""Long-running responses, streamed or not, which are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from fastgen.server.http.api_error import APIError
from fastgen.server.http.connection import BodyWriter, body_writer

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
CLIENT_CLOSED_REQUEST = 499
_MARK = "\0"


def event(body: object) -> bytes:
    """Encode a server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventTemplate:
    """Encodes events whose bodies differ in one text, as `event` does, without building the bodies.

    Args:
        body_with: returns the body with a given text.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, body_with: Callable[[str], object]) -> None:
        # The mark is found with its quotes: JSON escapes quotes within strings, so no other string contains it.
        self._before, self._after = event(body_with(_MARK)).split(msgspec.json.encode(_MARK))

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + msgspec.json.encode(text) + self._after


class EventStream(Response):
    """A response of server-sent events, which `run` writes.

    When the client disconnects, `run` is cancelled. A comment is sent after `keep_alive_seconds` of silence, also
    while the request is queued, because proxies and clients drop idle connections. The specification of server-sent
    events recommends one every 15 seconds or so; clients ignore comments.
    """

    media_type = "text/event-stream"
    charset = "utf-8"
    keep_alive_seconds = 15.0
    writer: BodyWriter

    def __init__(self) -> None:
        # Proxies must forward each event at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._last_sent = 0.0

    async def run(self) -> bytes:
        """Write events until the end of the stream; return the last ones."""
        raise NotImplementedError

    def write(self, events: bytes) -> None:
        """Write events to the client."""
        self.writer.write(events)
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self.writer = body_writer(scope)
        self._last_sent = time.monotonic()
        running = asyncio.create_task(self.run())
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            while not (running.done() or disconnect.done()):
                remaining = self._last_sent + self.keep_alive_seconds - time.monotonic()
                if remaining > 0:
                    await asyncio.wait((running, disconnect), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                else:
                    self._keep_alive()
            if running.done():
                await send({"type": "http.response.body", "body": running.result(), "more_body": False})
        finally:
            await _cancel(running, disconnect)

    def _keep_alive(self) -> None:
        if self.writer.is_blocked:  # the client is not reading
            self._last_sent = time.monotonic()
        else:
            self.write(KEEP_ALIVE)


class GeneratedEvents(EventStream):
    """A response that sends the events that a generator yields. It closes the generator when it ends.

    If the generator raises an APIError, that is the last event, because the status has been sent.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._events = events

    async def run(self) -> bytes:
        """Write what the generator yields, as fast as the client reads."""
        try:
            async with aclosing(self._events):
                async for events in self._events:
                    self.write(events)
                    await self.writer.drain()
        except APIError as error:
            return event(error.body())
        return b""


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """Return the result of `work`. If the client disconnects first, cancel it and return a response with status 499."""
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        await _cancel(working, disconnect)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
