"""The operator's HTTP servers: the probes, the metrics, and the last decisions of the autoscaler.

Each has threads of its own, so that it answers while the event loop hangs. The number of its connections is bounded:
one more closes the oldest, so that clients that never end their requests keep no probe from its answer.

The server of decisions listens on the pod's loopback interface, for `kubectl fastgen explain-scaling`: the right to
read it is the right to forward ports of the operator's pods. Decisions contain names of pods and figures, no addresses
and no secrets.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from fastgen.version import VERSION
from fastgen_operator.autoscale.journal import Journal, to_json
from fastgen_operator.kinds import Key
from fastgen_operator.runtime.liveness import Stalled

logger = logging.getLogger(__name__)

# Connections of one server at a time. Probes and scrapes take milliseconds, one after the other.
_MOST_CONNECTIONS: Final = 32
# Seconds without a byte of a request after which its connection is closed.
_REQUEST_SECONDS: Final = 10

# Returns status and body for a path without its query, and for the host that the client asked for.
Handler = Callable[[str, str], tuple[int, object]]
# Returns the body of a 200 response; raises Stalled for a 500 response with its message.
Check = Callable[[], dict[str, float]]

DECISIONS_PATH: Final = "/decisions"
_LOOPBACK: Final = "127.0.0.1"
# Against DNS rebinding: a page in a browser on the machine that forwards the port could resolve its own name to it.
_HOSTS: Final = (_LOOPBACK, "localhost")


def listening_address(address: str) -> str:
    """Return the address to bind: for ::, which is all of IPv6 and IPv4, 0.0.0.0 on a machine without IPv6."""
    return "0.0.0.0" if address == "::" and not socket.has_dualstack_ipv6() else address


class _Bounded(ThreadingMixIn, TCPServer):
    """A server with a thread for each connection, and at most `_MOST_CONNECTIONS` of them."""

    daemon_threads = True
    # The default of 5 is full while the process waits for the processor: the kernel drops what comes then, and clients
    # try to connect again only after a second or more.
    request_queue_size = 128

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._lock = threading.Lock()
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__((address, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to serve a connection in a thread."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _MOST_CONNECTIONS else None
        if oldest is not None:
            # The thread that serves the connection then closes it.
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.pop(oldest, None)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver passes both
        """Log a failed connection without a traceback: clients may close it at any time."""
        logger.debug("connection from %s", client_address, exc_info=True)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # Also where the system separates the families by default.
            only = self.server_address[0] != "::"
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        super().server_bind()


class _Server(_Bounded, HTTPServer):
    """Serves a handler."""


class _MetricsServer(_Bounded, WSGIServer):
    """Serves prometheus_client's WSGI application."""


class _Silent(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, *_: object) -> None:
        """Log nothing: scrapes come every few seconds."""


@contextmanager
def metrics_server(address: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve the metrics of a registry, and yield the port. Raises OSError if it cannot listen there."""
    server = _MetricsServer(listening_address(address), port, _Silent)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class JsonServer:
    """Serves the JSON that a function returns for a path. The constructor raises OSError if it cannot listen there."""

    def __init__(self, address: str, port: int, answer: Handler, name: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
                status, value = answer(self.path.partition("?")[0], host)
                body = json.dumps(value, allow_nan=False).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: probes come every few seconds."""

        self._server = _Server(listening_address(address), port, Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)

    def __enter__(self) -> JsonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def health_server(address: str, port: int, checks: dict[str, Check]) -> JsonServer:
    """Return a server of one check per path."""

    def answer(path: str, _: str) -> tuple[int, object]:
        if path not in checks:
            return 404, {"error": f"no such path: {path}"}
        try:
            return 200, checks[path]()
        except Stalled as error:
            return 500, {"error": str(error)}

    return JsonServer(address, port, answer, "health")


def decision_server(port: int, find: Callable[[Key], Journal | None]) -> JsonServer:
    """Return a server of `/decisions/NAMESPACE/NAME`.

    Args:
        find: returns the last decisions about a resource; None if this operator has not decided on it.
    """

    def answer(path: str, host: str) -> tuple[int, object]:
        if host not in _HOSTS:
            return 403, {"error": f"use {_LOOPBACK} or localhost as the host, not {host}"}
        namespace, _, name = path.removeprefix(f"{DECISIONS_PATH}/").partition("/")
        if not path.startswith(f"{DECISIONS_PATH}/") or not name or "/" in name:
            return 404, {"error": f"no such path: {path}; use {DECISIONS_PATH}/NAMESPACE/NAME"}
        journal = find((namespace, name))
        if journal is None:
            return 404, {"error": f"no decision about {namespace}/{name}"}
        return 200, {"version": VERSION, "journal": to_json(journal)}

    return JsonServer(_LOOPBACK, port, answer, "decisions")
