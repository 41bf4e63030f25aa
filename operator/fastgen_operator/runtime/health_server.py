"""HTTP server for the probes, in a thread of its own, so that it answers while the event loop hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fastgen_operator.runtime.liveness import Stalled

# Returns the body of a 200 response; raises Stalled for a 500 response with its message.
Check = Callable[[], dict[str, float]]


class HealthServer:
    """Serves one check per path. Raises OSError if the port is in use."""

    def __init__(self, address: str, port: int, checks: dict[str, Check]) -> None:
        self._server = ThreadingHTTPServer((address, port), partial(_Handler, checks))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

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
    def __init__(self, checks: dict[str, Check], *args: object) -> None:
        self._checks = checks
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        check = self._checks.get(self.path.partition("?")[0])
        if check is None:
            self._answer(404, {"error": f"no such path: {self.path}"})
            return
        try:
            self._answer(200, check())
        except Stalled as error:
            self._answer(500, {"error": str(error)})

    def _answer(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come every few seconds."""
