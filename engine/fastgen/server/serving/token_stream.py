"""The streamed response of a request handler.

What its generations add is written when the engine has reported it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Protocol

from fastgen.server.http.api_error import APIError
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import EventStream
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.text.request_output import OutputDelta

log = logging.getLogger("fastgen.server")


class StreamEvents(Protocol):
    """Encodes the events of one stream, in the format of its endpoint."""

    def begin(self) -> bytes:
        """Return what comes before the first delta."""

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        """Return the events of a delta of generation `index`."""

    def end(self) -> bytes:
        """Return what comes after the last delta."""

    def fail(self, error: APIError) -> bytes:
        """Return what ends the stream instead, if the request fails."""


class TokenStream(EventStream):
    """Streams the generations of a request handler.

    The deltas of one report are encoded and written together, in one callback of the event loop and without a task.
    Nothing is written while the client does not read. The generations continue, and what they add is merged. When the
    client reads on, it is encoded in parts, between which the event loop serves other requests.

    Args:
        handler: the request.
        events: encodes its deltas.
    """

    def __init__(self, handler: RequestHandler, events: StreamEvents) -> None:
        super().__init__()
        self._handler = handler
        self._events = events
        self._is_broken = False  # whether a delta could not be encoded

    async def run(self) -> bytes:
        """Write events until the generations have ended; return the last ones."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        self.writer.on_writable(self._flush)
        try:
            with self._handler as handler:
                self.write(self._events.begin())
                await handler.run(lambda: loop.call_soon(self._flush, context=context))
                last = await self._last()
            return last + await off_loop(self._events.end)
        except APIError as error:
            return await self._last() + self._events.fail(error)
        finally:
            self.writer.on_writable(None)

    def _flush(self) -> None:
        """Write what is new, unless the client does not read. `run` writes the last of it."""
        if self.writer.is_blocked or self._handler.has_ended:
            return
        try:
            self.write(self._taken())
        except Exception as error:  # a defect, which ends this stream only
            log.exception("the output of response %s could not be encoded", self._handler.id)
            self._is_broken = True
            self._handler.fail(error)
        if self._handler.has_deltas:  # other requests have their turn first
            asyncio.get_running_loop().call_soon(self._flush)

    async def _last(self) -> bytes:
        """Return the last events of the generations, after writing those before them as fast as the client reads."""
        await self.writer.drain()
        if self._is_broken:
            return b""
        events = self._taken()
        while self._handler.has_deltas:
            self.write(events)
            await asyncio.sleep(0)  # other requests have their turn
            await self.writer.drain()
            events = self._taken()
        return events

    def _taken(self) -> bytes:
        return b"".join([self._events.delta(index, delta) for index, delta in self._handler.take()])
