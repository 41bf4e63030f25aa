"""An HTTP connection on top of uvicorn's.

It limits the size of a request's head and the time a request takes to arrive, closes connections during a drain, and
lets a response write its body to the transport directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastgen.server.http.errors import APIError

# Request line and headers together: the largest limit among common proxies.
MAX_HEAD_BYTES = 64 << 10
CLOSE = (b"connection", b"close")
_KEPT = "kept_connection"
# Name of the ASGI extension that is a response's BodyWriter.
BODY_WRITER = "fastgen.body"


class BodyWriter:
    """Writes parts of a response's body to its connection at once.

    ASGI's `send` takes a coroutine in every layer of the application for each part: for a stream of tokens that costs
    more than encoding them. The head and the end of the response go through `send`, and the layers see them.
    """

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cycle: RequestResponseCycle = connection.cycle

    @property
    def is_blocked(self) -> bool:
        """Return whether the client does not read: what is written now waits in memory."""
        return self._cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        """Write a part, unless the client has disconnected.

        The head must have been sent, without Content-Length.
        """
        cycle = self._cycle
        if part and not cycle.disconnected:  # an empty part would end the body
            assert cycle.chunked_encoding, "the response has not begun, or has a Content-Length"
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` whenever a client that did not read reads again."""
        self._connection.writable_callback = callback

    async def drain(self) -> None:
        """Wait until the client reads, or has disconnected."""
        await self._cycle.flow.drain()


def body_writer(scope: Scope) -> BodyWriter:
    """Return the writer for the body of the response to a request."""
    return cast(BodyWriter, scope["extensions"][BODY_WRITER])


class Connection(HttpToolsProtocol):
    """Rejects invalid HTTP, oversized heads and slow requests with an OpenAI error, then closes."""

    read_seconds = 60.0
    _timer: asyncio.TimerHandle | None = None
    _error: APIError | None = None
    _reading_head = True
    _head_bytes = 0
    _is_kept = False
    writable_callback: Callable[[], object] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being received or answered."""
        return self._timer is None and (self.cycle is None or bool(self.cycle.response_complete))

    def end_soon(self, idle_seconds: float) -> None:
        """End the connection with its next response, or after an idle time.

        The response is the next one whose head can still say so. Without one the connection ends after `idle_seconds`.
        Closed at once, an idle connection might lose the request that its client is just sending.
        """
        self._is_kept = True
        self.timeout_keep_alive = idle_seconds  # type: ignore[assignment]  # uvicorn's takes whole seconds from its flag
        if self.is_idle:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(idle_seconds, self.timeout_keep_alive_handler)
        elif self.cycle is not None and not self.cycle.response_started:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client."""
        if self.transport.is_closing():
            return
        # Counted here as well, because the parser buffers a whole header line before it reports it.
        if self._reading_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reading_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._error = _head_too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        super().on_message_begin()
        self.scope["state"][_KEPT] = self._is_kept
        self._reading_head = True
        # A pipelined request is not read before the previous response ends, so its time does not count.
        if self.cycle is None or self.cycle.response_complete:
            self._arm()

    def on_headers_complete(self) -> None:
        """Handle a complete request head."""
        self._reading_head, self._head_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._error = _head_too_large()
            raise HttpParserError("the head is too large")
        super().on_headers_complete()
        # The request's task, or that of the request before it, has not run yet.
        self.scope["extensions"] = {BODY_WRITER: cast(dict[object, object], BodyWriter(self))}

    def on_message_complete(self) -> None:
        """Handle a complete request."""
        self._disarm()
        super().on_message_complete()

    def resume_writing(self) -> None:
        """Handle that the client reads again."""
        super().resume_writing()
        if self.writable_callback is not None:
            self.writable_callback()

    def send_400_response(self, msg: str) -> None:
        """Reject the request; uvicorn calls this if the parser fails."""
        if self._response_started():  # an error now would corrupt the response
            self.transport.close()
            return
        error = self._error or APIError(400, msg or "the request is not valid HTTP", code="invalid_http")
        response = error.response()
        head = [f"HTTP/1.1 {error.status} {error.code}".encode(), *(b": ".join(pair) for pair in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self.read_seconds, self._on_timeout)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _response_started(self) -> bool:
        """Return whether the response to the current request has started."""
        return not self._reading_head and self.cycle is not None and self.cycle.response_started

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        self._error = APIError(
            408, f"the request was not received within {self.read_seconds:g} s; send it faster", code="request_timeout"
        )
        self.send_400_response("")


def is_kept(scope: Scope) -> bool:
    """Return whether a request's connection was made before the server began to drain."""
    return bool(scope.get("state", {}).get(_KEPT, False))


def connection_class(read_seconds: float) -> type[Connection]:
    """Return a Connection that must receive each request within `read_seconds` of its first byte."""
    return type("Connection", (Connection,), {"read_seconds": read_seconds})


def _head_too_large() -> APIError:
    return APIError(
        431,
        f"the request line and headers are larger than {MAX_HEAD_BYTES >> 10} KiB; send fewer or shorter headers",
        code="head_too_large",
    )
