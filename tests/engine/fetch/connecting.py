"""A forward proxy that opens tunnels (CONNECT), and a TLS server in front of another one."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

from cluster.pki import Authority
from engine.fetch.proxy import Proxy


@dataclass
class Tunnels:
    """A running forward proxy; `targets` are the requested addresses."""

    url: str = ""
    targets: list[str] = field(default_factory=list)


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def _serving(server: ThreadingTCPServer) -> Iterator[int]:
    """Run the server, and yield its port."""
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def forward_proxy() -> Iterator[Tunnels]:
    """Run a proxy that only opens tunnels."""
    tunnels = Tunnels()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.request.recv(1)
            method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            tunnels.targets.append(target)
            if method != "CONNECT":
                self.request.sendall(b"HTTP/1.1 405 Only CONNECT\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = target.rpartition(":")
            self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            Proxy((host, int(port))).carry(self.request)

    with _serving(_Server(("127.0.0.1", 0), Handler)) as port:
        tunnels.url = f"http://127.0.0.1:{port}"
        yield tunnels


@contextmanager
def over_tls(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Put a TLS server in front of a port of 127.0.0.1; yield its URL and the certificate of its authority."""
    Authority.open(folder).issue("server", "server", hosts=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            Proxy(("127.0.0.1", port)).carry(self.request)

    class Server(_Server):
        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            return context.wrap_socket(connection, server_side=True), address

    with _serving(Server(("127.0.0.1", 0), Handler)) as secure:
        yield f"https://localhost:{secure}", folder / "ca.crt"
