"""Persistent HTTP/1.1 connections: a non-blocking socket with httptools' parser.

See docs/decisions/029-scrapes-over-a-parser.md and 036-scrapes-over-sockets.md.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from contextlib import suppress
from typing import Final

from httptools import HttpParserError, HttpResponseParser

from fastgen_operator.autoscale.scrape.exposition import UnusableError

# Headers that delimit the body. Without them, it ends with the connection.
_LENGTHS: Final = frozenset((b"content-length", b"transfer-encoding"))
# Bytes to receive at once: usually a whole response.
_CHUNK: Final = 1 << 16


class StaleConnectionError(ConnectionError):
    """The peer closed the connection before it sent a byte of the response."""


class Connection:
    """A non-blocking connection for one request at a time. httptools calls its `on_` methods.

    Args:
        host: an IP address.
        limit: maximum size of a response in bytes, headers and encoding included.

    Attributes:
        is_open: whether the connection can be used, now or once it is established.
        is_waiting: whether a request has no response yet.

    Raises:
        OSError: there is no route to the host.
    """

    def __init__(self, host: str, port: int, limit: int) -> None:
        self._limit = limit
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self.is_open, self.is_waiting = True, False
        self._unsent = b""
        self._num_received = 0
        self._status = 0
        self._has_length = False
        self._body: list[bytes] = []
        self._response: tuple[int, bytes] | None = None
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        if (error := self._socket.connect_ex((host, port))) not in (0, errno.EINPROGRESS):
            self.close()
            raise OSError(error, os.strerror(error))

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The selector events to wait for before the next `advance`."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self.is_open = False
        self._socket.close()
        self._parser = None  # break the reference cycle

    def is_silent(self) -> bool:
        """Return whether the peer neither closed the connection nor sent anything since."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def begin(self, request: bytes) -> None:
        """Begin a request without a body. `advance` continues it and raises its errors."""
        assert self.is_open, "the connection is closed"
        assert not self.is_waiting, "a connection has one request at a time"
        self._unsent, self.is_waiting = request, True
        self._num_received, self._status, self._has_length, self._body = 0, 0, False, []
        self._response = None
        with suppress(OSError):
            self._unsent = request[self._socket.send(request) :]

    def advance(self) -> tuple[int, bytes] | None:
        """Send or receive what is possible; return status and body of a complete response.

        Raises:
            StaleConnectionError: the peer closed the connection before the response.
            UnusableError: the response exceeds the limit.
            OSError: the connection failed or was lost, or the response is not HTTP.
        """
        try:
            if self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
                return None
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return None
        except ConnectionRefusedError:
            raise
        except ConnectionError as error:
            raise self._lost(f": {error}") from None
        if data:
            self._receive(data)
        else:
            # The end of the connection ends a body without a length, and cuts any other response.
            self.is_open = False
            if not self._status or self._has_length:
                raise self._lost()
            self._response = self._status, b"".join(self._body)
        self.is_waiting = self._response is None
        return self._response

    def _receive(self, data: bytes) -> None:
        assert self._parser is not None
        self._num_received += len(data)
        if self._num_received > self._limit:
            raise UnusableError("TooLarge", f"the response exceeds {self._limit >> 10} KiB")
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            if self._response is None:
                raise ConnectionError(f"the response is not HTTP: {error}") from None
            self.is_open = False

    def _lost(self, why: str = "") -> ConnectionError:
        kind = ConnectionError if self._num_received else StaleConnectionError
        return kind(f"the connection was closed before the end of the response{why}")

    def on_message_begin(self) -> None:
        """Stop reusing the connection if a second response begins: no request asked for it."""
        self.is_open &= self._response is None

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002  # httptools passes both
        """Remember whether the body is delimited."""
        self._has_length |= name.lower() in _LENGTHS

    def on_headers_complete(self) -> None:
        """Remember the status."""
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Append a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Complete the response."""
        assert self._parser is not None
        if self._response is None:
            self._response = self._status, b"".join(self._body)
        self.is_open &= self._parser.should_keep_alive()
