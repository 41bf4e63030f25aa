"""Responses that take a while: as server-sent events, or whole; either ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fastgen.server.errors import APIError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_CLIENT_CLOSED_REQUEST = 499


def event(body: object) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. Its source is closed when the response is over, however that comes about."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(
            _with_errors(events),
            media_type="text/event-stream",
            # Proxies must pass each event on at once.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; a client that goes away ends it early."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _with_errors(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The status is long sent when an error comes: it becomes the stream's last event."""
    try:
        async for chunk in events:
            yield chunk
    except APIError as error:
        yield event(error.body())
    yield DONE


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """The result of `work`, which is cancelled if the client goes away first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
