"""A read-only HTTP server of JSON.

It has its own thread, so that it answers while the event loop hangs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# Returns status and body for a path without its query, and for the host that the client asked for.
Answer = Callable[[str, str], tuple[int, object]]


class JsonServer:
    """Serves what a function returns for a path. Raises OSError if the port is in use."""

    def __init__(self, address: str, port: int, answer: Answer, name: str) -> None:
        self._server = ThreadingHTTPServer((address, port), partial(_Handler, answer))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, answer: Answer, *args: object) -> None:
        self._answer = answer
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        status, value = self._answer(self.path.partition("?")[0], host)
        body = json.dumps(value, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come every few seconds."""
