"""uvicorn's server with a drain: the caller handles signals and decides when connections end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from fastgen.server.http.connection import CLOSE, Connection, connection_class

# For the last bytes to reach the clients after the drain.
FLUSH_SECONDS = 5
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s common in proxies, which must be the side that closes


class HTTPServer(uvicorn.Server):
    """Serves an application; the caller handles signals and drains it before it shuts down.

    Args:
        app: the application.
        request_read_seconds: how long a client may take to send a request, or read nothing of a response.
    """

    def __init__(self, app: ASGIApp, request_read_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(request_read_seconds),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )

    @property
    def has_idle_connections(self) -> bool:
        """Return whether a connection waits for its next request."""
        return any(connection.is_idle for connection in self._connections())

    def end_connections(self, idle_seconds: float) -> None:
        """Say `Connection: close` in each response from now on, and close connections that stay idle."""
        self.config.encoded_headers.append(CLOSE)  # uvicorn rebuilds the headers of all responses from it
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for connection in self._connections():
            connection.end_soon(idle_seconds)

    def _connections(self) -> list[Connection]:
        return [connection for connection in self.server_state.connections if isinstance(connection, Connection)]

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to the caller."""
        yield
