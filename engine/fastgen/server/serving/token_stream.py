"""The streamed response of a request handler.

What its generations add is written when the engine has reported it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Protocol

from fastgen.server.http.api_error import APIError
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
    Nothing is written while the client does not read. The generations continue, and what each adds becomes one delta.

    Args:
        handler: the request.
        events: encodes its deltas.
    """

    def __init__(self, handler: RequestHandler, events: StreamEvents) -> None:
        super().__init__()
        self._handler = handler
        self._events = events

    async def run(self) -> bytes:
        """Write events until the generations have ended; return the last ones."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        self.writer.on_writable(self._flush)
        try:
            with self._handler as handler:
                self.write(self._events.begin())
                await handler.run(lambda: loop.call_soon(self._flush, context=context))
                await self.writer.drain()
                last = self._taken()
            return last + self._events.end()
        except APIError as error:
            return self._taken() + self._events.fail(error)
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
            self._handler.fail(error)

    def _taken(self) -> bytes:
        return b"".join([self._events.delta(index, delta) for index, delta in self._handler.take()])
