"""An HTTP server for stand-ins that answer GET requests at an address of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class GetServer:
    """Serves from its creation until it is closed, each request in its own thread.

    Args:
        address: an IPv4 address of the loopback network.
        port: the port there.
        answer: returns status and body for a path; it may hang.
    """

    def __init__(self, address: str, port: int, answer: Callable[[str], tuple[int, bytes]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Stop serving and release the address. Threads that hang are left."""
        self._server.shutdown()
        self._server.server_close()
