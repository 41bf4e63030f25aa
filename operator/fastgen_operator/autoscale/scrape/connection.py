"""HTTP/1.1 connections to replicas, each kept for many requests.

A connection is a non-blocking socket with httptools' parser. See docs/decisions/029-scrapes-over-a-parser.md and
036-scrapes-over-sockets.md.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from contextlib import suppress
from typing import Final

from httptools import HttpParserError, HttpResponseParser

# Headers that say where the body ends. Without them it ends with the connection.
_LENGTHS: Final = frozenset((b"content-length", b"transfer-encoding"))
# Bytes to receive at once: a whole response.
_CHUNK: Final = 1 << 16


class StaleConnectionError(ConnectionError):
    """The peer closed the connection before it sent a byte of the response."""


class TooLargeError(Exception):
    """A response is larger than the limit."""


class Connection:
    """A connection for one request at a time, which never blocks.

    httptools calls the methods named `on_...`.

    Args:
        host: an IP address.
        limit: maximum size of a response in bytes, headers and encoding included.

    Attributes:
        is_open: whether the connection can be used, or will be when it is established.
        is_waiting: whether there is a request without a response.

    Raises:
        OSError: there is no route.
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
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events of selectors after which `advance` can do something."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def close(self) -> None:
        """Close the connection at once. May be called again."""
        self.is_open = False
        self._socket.close()
        self._parser = None  # it refers to this object

    def is_silent(self) -> bool:
        """Return whether the peer has been silent since the last response.

        It has neither closed the connection nor sent anything.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def begin(self, request: bytes) -> None:
        """Begin a request without a body; `advance` does the rest, and reports errors."""
        assert self.is_open, "the connection is closed"
        assert not self.is_waiting, "a connection has one request at a time"
        self._unsent, self.is_waiting = request, True
        self._num_received, self._status, self._has_length, self._body = 0, 0, False, []
        self._response = None
        with suppress(OSError):
            self._unsent = request[self._socket.send(request) :]

    def advance(self) -> tuple[int, bytes] | None:
        """Send or receive what is possible now.

        Return the status and the body of a complete response, else None. After a response the connection is closed if
        the response says so.

        Raises:
            StaleConnectionError: the peer closed the connection before the response.
            TooLargeError: the response exceeds the limit.
            OSError: there is no connection, or it was lost, or the response is not HTTP.
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
            self._receive_end()
        if self._response is not None:
            self.is_waiting = False
        return self._response

    def _receive(self, data: bytes) -> None:
        assert self._parser is not None
        self._num_received += len(data)
        if self._num_received > self._limit:
            raise TooLargeError(f"the response exceeds {self._limit >> 10} KiB")
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            if self._response is None:
                raise ConnectionError(f"the response is not HTTP: {error}") from None
            self.is_open = False

    def _receive_end(self) -> None:
        """End a body without a length; fail any other response."""
        self.is_open = False
        if not self._status or self._has_length:
            raise self._lost()
        self._response = self._status, b"".join(self._body)

    def _lost(self, why: str = "") -> ConnectionError:
        kind = ConnectionError if self._num_received else StaleConnectionError
        return kind(f"the connection was closed before the end of the response{why}")

    def on_message_begin(self) -> None:
        """Use the connection for nothing else after a second response, for which there is no request."""
        self.is_open &= self._response is None

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002  # httptools passes both
        """Notice whether the body has a length."""
        self._has_length |= name.lower() in _LENGTHS

    def on_headers_complete(self) -> None:
        """Remember the status."""
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """End the request."""
        assert self._parser is not None
        if self._response is None:
            self._response = self._status, b"".join(self._body)
        self.is_open &= self._parser.should_keep_alive()
