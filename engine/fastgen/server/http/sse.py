"""Long-running responses, streamed or not, which are cancelled when the client disconnects."""

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
CLIENT_CLOSED_REQUEST = 499


def event(body: object) -> bytes:
    """Encode a server-sent event with a JSON body."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events. It closes the event generator when the response ends, successfully or not.

    A comment is sent after `keep_alive_seconds` of silence, also while the request is queued, because proxies and
    clients drop idle connections. The specification of server-sent events recommends one every 15 seconds or so;
    clients ignore comments.
    """

    media_type = "text/event-stream"
    charset = "utf-8"
    keep_alive_seconds = 15.0
    done = DONE  # what follows the last event

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # Proxies must forward each event at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events
        self._is_sending = False
        self._last_sent = 0.0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        sending = asyncio.create_task(self._send_events(send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            while not (sending.done() or disconnect.done()):
                remaining = self._last_sent + self.keep_alive_seconds - time.monotonic()
                if remaining > 0:
                    await asyncio.wait((sending, disconnect), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await self._keep_alive(send)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, disconnect)
            await self._events.aclose()

    async def _keep_alive(self, send: Send) -> None:
        self._last_sent = time.monotonic()
        if not self._is_sending:  # otherwise the client is not reading
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _send_events(self, send: Send) -> None:
        async def send_body(body: bytes, *, more: bool) -> None:
            self._is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._last_sent, self._is_sending = time.monotonic(), False

        try:
            async for chunk in self._events:
                await send_body(chunk, more=True)
        except APIError as error:
            # The status has been sent, so the error becomes the stream's last event.
            await send_body(event(error.body()), more=True)
        await send_body(self.done, more=False)


async def while_connected(request: Request, work: Coroutine[None, None, T]) -> T | Response:
    """Return the result of `work`; cancel it if the client disconnects first."""
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
