"""A TCP proxy that cuts connections after a number of response bytes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread


@dataclass
class Proxy:
    """Forwards bytes to `target`.

    Attributes:
        cut_after: total numbers of response bytes after which the connection is cut, once each.
        passed: response bytes so far.
    """

    target: tuple[str, int]
    url: str = ""
    cut_after: list[int] = field(default_factory=list)
    passed: int = 0

    def carry(self, client: socket.socket) -> None:
        """Handle one connection."""
        with socket.create_connection(self.target) as server:
            asking = Thread(target=_pump, args=(client, server))
            asking.start()
            with contextlib.suppress(OSError):
                while data := server.recv(1 << 14):
                    if self.cut_after and self.passed + len(data) > self.cut_after[0]:
                        client.sendall(data[: self.cut_after[0] - self.passed])
                        self.passed = self.cut_after.pop(0)
                        break
                    client.sendall(data)
                    self.passed += len(data)
            for each in (client, server):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            asking.join()


def _pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 14):
            to.sendall(data)


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def cutting(port: int) -> Iterator[Proxy]:
    """Yield a proxy in front of a port of 127.0.0.1."""
    proxy = Proxy(("127.0.0.1", port))

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            proxy.carry(self.request)

    with _Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
