"""An HTTP connection on top of uvicorn's.

It limits what a client can make the server keep before a request is served: the size of its head, the time that it
takes to arrive, the number of pipelined requests, and the number of connections. It closes connections during a drain,
and lets a response write its body to the transport directly. It ignores requests to upgrade to another protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastgen.server.http.api_error import APIError

# Request line and headers together: the largest limit among common proxies.
MAX_HEAD_BYTES = 64 << 10
# In memory, a header takes ten times its bytes.
_MOST_HEADERS = 256
# Headers that decide whether a request is admitted. If one is repeated, a proxy may read another one than this server.
_ONLY_ONCE = frozenset({b"host", b"authorization", b"content-type"})
# Requests that a connection may have sent before it gets the response to an earlier one.
_MOST_PIPELINED = 64
# A connection takes up to 100 KB while its request arrives.
_MOST_CONNECTIONS = 4096
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
            is_open = cycle.chunked_encoding or getattr(cycle, "ends_by_closing", False)
            assert is_open, "the response has not begun, or has a Content-Length"
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if cycle.chunked_encoding else part)

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` whenever a client that did not read reads again; None stops that."""
        self._connection.writable_callback = callback

    async def drain(self) -> None:
        """Wait until the client reads, or has disconnected."""
        await self._cycle.flow.drain()


def body_writer(scope: Scope) -> BodyWriter:
    """Return the writer for the body of the response to a request."""
    return cast(BodyWriter, scope["extensions"][BODY_WRITER])


class _UnchunkedCycle(RequestResponseCycle):
    """The response to an HTTP/1.0 client, which knows no chunks.

    Without a Content-Length, it ends when the connection is closed.
    """

    ends_by_closing = False

    async def send(self, message: Any) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.ends_by_closing = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self.ends_by_closing:
                self.chunked_encoding = False
        elif self.ends_by_closing:
            self.expected_content_length = len(message.get("body", b""))  # as much as this part has
        await super().send(message)


class _Parser(HttpRequestParser):
    """A parser for a server that ignores Upgrade, as RFC 9110 (7.8) allows.

    httptools ends a request that asks for another protocol with its head, and would take its body for the next request.
    So the head is parsed once more, without that header.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        # Data after a request with `Connection: close` must be no error, which would be sent instead of the response.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn gives it nothing else
        """Parse bytes from the client."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            rest = self._connection.head_without_upgrade() + data[upgrade.args[0] :]
            self._connection.parser = _Parser(self._connection)  # this one may have ended
            self._connection.parser.feed_data(rest)


class Connection(HttpToolsProtocol):
    """Rejects invalid HTTP, oversized heads and slow requests with an OpenAI error, then closes.

    Attributes:
        read_seconds: how long a request may take to arrive, and a client may read nothing of a response.
        waiting: connections of the server without a request in progress, the one that has waited longest first.
        writable_callback: see `BodyWriter.on_writable`; None for no callback.
    """

    read_seconds = 60.0
    waiting: dict[Connection, None]
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _error: APIError | None = None
    _reading_head = True
    _pending_bytes = 0  # since the end of a head, or a piece of a body
    _is_kept = False
    writable_callback: Callable[[], object] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being received or answered.

        A new connection counts as receiving its first request.
        """
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
        """Start the timer for the first request. Of too many connections, close the one that has waited longest."""
        super().connection_made(transport)
        self.parser = _Parser(self)
        self.waiting[self] = None
        self._arm()
        if len(self.connections) > _MOST_CONNECTIONS:
            next(iter(self.waiting)).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and forget the connection."""
        self._disarm()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client."""
        if self.transport.is_closing():
            return
        # Counted here as well, because the parser buffers a whole header line before it reports it. It does not report
        # extensions of chunks at all.
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; too many are an error. Trailers are ignored: their request is being served."""
        if not self._reading_head:
            return
        if len(self.headers) == _MOST_HEADERS:
            self._error = APIError(
                431, f"the request has more than {_MOST_HEADERS} headers; send fewer", code="head_too_large"
            )
            raise HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check a complete request head, and let uvicorn serve the request."""
        if self.parser.get_method() == b"CONNECT":  # what follows would not be a request
            self._error = APIError(405, "this server is not a proxy: CONNECT is not supported", code="invalid_method")
            raise HttpParserError("CONNECT")
        if self.parser.should_upgrade():  # the parser reads the head once more
            return
        self._check_repetitions()
        self._reading_head, self._pending_bytes = False, 0
        self.waiting.pop(self, None)
        if len(self.pipeline) == _MOST_PIPELINED:  # an error would be taken for the response to an earlier request
            self.transport.close()
            raise HttpParserError("too many requests before the response to the first one")
        size = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._error = _head_too_large()
            raise HttpParserError("the head is too large")
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UnchunkedCycle
            self.cycle.waiting_for_100_continue = False
        # The request's task, or that of the request before it, has not run yet.
        self.scope["extensions"] = {BODY_WRITER: cast(dict[object, object], BodyWriter(self))}

    def _check_repetitions(self) -> None:
        """Reject a head that repeats a header of `_ONLY_ONCE`, as RFC 9112 (3.2) requires for Host."""
        names = [name for name, _ in self.headers if name in _ONLY_ONCE]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            self._error = APIError(
                400, f"the request has the header {repeated.decode()} more than once; send it once", code="invalid_http"
            )
            raise HttpParserError("a repeated header")

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a request's body."""
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle a complete request."""
        if self.parser.should_upgrade():
            return
        self._pending_bytes = 0
        self._disarm()
        super().on_message_complete()

    def head_without_upgrade(self) -> bytes:
        """Return the head that has just been parsed, without its request for another protocol."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(option for option in value.split(b",") if option.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_response_complete(self) -> None:
        """Handle the end of a response."""
        super().on_response_complete()
        self._watch_client()
        if not self.pipeline and not self.transport.is_closing():
            self.waiting[self] = None

    def pause_writing(self) -> None:
        """Handle that the client does not read."""
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        """Handle that the client reads again."""
        super().resume_writing()
        if self.writable_callback is not None:
            self.writable_callback()

    def send_400_response(self, msg: str) -> None:
        """Reject the request with 400, or with the error that was found before, and close the connection.

        uvicorn calls this if the parser fails.
        """
        if self.transport.is_closing():
            return
        if self._response_started():  # an error now would corrupt the response
            self.transport.close()
            return
        error = self._error or APIError(400, msg or "the request is not valid HTTP", code="invalid_http")
        response = error.response()
        head = [f"HTTP/1.1 {error.status} {error.code}".encode(), *(b": ".join(pair) for pair in response.raw_headers)]
        self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)]))
        self.transport.close()
        self._watch_client()

    def _watch_client(self) -> None:
        """Disconnect the client if it reads nothing for `read_seconds`: the response is held in memory."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes:
            self._write_timer = self.loop.call_later(self.read_seconds, self._check_client, num_bytes)

    def _check_client(self, num_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes:
            self._watch_client()
        elif self.flow.write_paused or self.transport.is_closing() or self.is_idle:  # nothing was added meanwhile
            self.transport.abort()

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
    """Return the class of one server's connections: a subclass of `Connection` with these `read_seconds`."""
    return type("Connection", (Connection,), {"read_seconds": read_seconds, "waiting": {}})


def _head_too_large() -> APIError:
    return APIError(
        431,
        f"the request line and headers are larger than {MAX_HEAD_BYTES >> 10} KiB; send fewer or shorter headers",
        code="head_too_large",
    )
