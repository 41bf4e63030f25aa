"""Responses that take a while: as server-sent events, or whole; either ends when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from fastgen.server.http.errors import APIError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_CLIENT_CLOSED_REQUEST = 499


def event(body: object) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Server-sent events. Their source is closed when the response is over, however that comes about.

    A comment is sent in every silence of `keep_alive_seconds`, also while the request is queued: proxies and clients
    give connections up on which nothing comes. The specification of server-sent events says to send one every 15
    seconds or so; clients pass over comments.
    """

    media_type = "text/event-stream"
    charset = "utf-8"
    keep_alive_seconds = 15.0

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # Proxies must pass each event on at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events
        self._is_sending = False
        self._last_sent = 0.0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; a client that goes away ends it early."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        sending = asyncio.create_task(self._send_events(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            while not (sending.done() or leaving.done()):
                rest = self._last_sent + self.keep_alive_seconds - time.monotonic()
                if rest > 0:
                    await asyncio.wait((sending, leaving), timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await self._keep_alive(send)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, leaving)
            await self._events.aclose()

    async def _keep_alive(self, send: Send) -> None:
        self._last_sent = time.monotonic()
        if not self._is_sending:  # else it is the client that does not read
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _send_events(self, send: Send) -> None:
        async def pass_on(body: bytes, *, more: bool) -> None:
            self._is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._last_sent, self._is_sending = time.monotonic(), False

        try:
            async for chunk in self._events:
                await pass_on(chunk, more=True)
        except APIError as error:
            # The status is long sent: the error becomes the stream's last event.
            await pass_on(event(error.body()), more=True)
        await pass_on(DONE, more=False)


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """The result of `work`, which is cancelled if the client goes away first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        await _end(working, leaving)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
