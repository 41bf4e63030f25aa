"""One client's connection: uvicorn's, with limits on the head of a request and on how long it may take to come."""

from __future__ import annotations

import asyncio

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fastgen.server.http.errors import APIError

# Request line and headers together, as large as the largest of the usual proxies let through.
MOST_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """What is not HTTP, has too large a head or comes too slowly gets an answer in OpenAI's form, and is closed."""

    read_seconds = 60.0
    _timer: asyncio.TimerHandle | None = None
    _refusal: APIError | None = None
    _reads_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes bytes from the client."""
        if self.transport.is_closing():
            return
        # Counted here too: the parser collects a single header, however long, before it tells.
        if self._reads_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reads_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _head_too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._reads_head = True
        # A pipelined request is not read on before the response to the one before it: its client is not the slow one.
        if self.cycle is None or self.cycle.response_complete:
            self._arm()

    def on_headers_complete(self) -> None:
        """The head of a request is there."""
        self._reads_head, self._head_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise HttpParserError("the head is too large")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser could not read; uvicorn calls it."""
        if self._is_answered():  # more words would mix with the response
            self.transport.close()
            return
        error = self._refusal or APIError(400, msg or "this is not HTTP", code="invalid_http")
        response = error.response()
        head = [f"HTTP/1.1 {error.status} {error.code}".encode(), *(b": ".join(pair) for pair in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self.read_seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_answered(self) -> bool:
        """Has the response begun to a request whose head is there?"""
        return not self._reads_head and self.cycle is not None and self.cycle.response_started

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        self._refusal = APIError(
            408, f"the request did not come whole within {self.read_seconds:g} s", code="request_timeout"
        )
        self.send_400_response("")


def connection_class(read_seconds: float) -> type[Connection]:
    """Connections on which a request must have come whole within so many seconds of its first byte."""
    return type("Connection", (Connection,), {"read_seconds": read_seconds})


def _head_too_large() -> APIError:
    return APIError(431, f"the request's head is larger than {MOST_HEAD_BYTES >> 10} KiB", code="head_too_large")
