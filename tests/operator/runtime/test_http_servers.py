"""The operator's own servers: their addresses, and clients that never end their requests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from fastgen_operator.runtime import http_servers
from fastgen_operator.runtime.http_servers import health_server, listening_address, metrics_server
from fastgen_operator.runtime.settings import Settings
from support.waiting import eventually


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_probes_are_answered_at_addresses_of_both_families(host: str) -> None:
    default = next(field.default for field in Settings.__dataclass_fields__.values() if field.name == "bind_address")
    assert default == "::"
    with health_server(default, 0, {"/healthz": lambda: {"ok": 1.0}}) as server:
        assert httpx.get(f"http://{host}:{server.port}/healthz", timeout=60).json() == {"ok": 1.0}


def test_one_address_is_bound_alone() -> None:
    with health_server("::1", 0, {"/healthz": dict}) as server, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_a_machine_without_ipv6_is_served_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert listening_address("::") == "0.0.0.0"
    with health_server("::", 0, {"/healthz": dict}) as server:
        assert httpx.get(f"http://127.0.0.1:{server.port}/healthz", timeout=60).status_code == 200


def test_clients_connect_although_the_server_has_no_time_to_accept_them() -> None:
    server = health_server("127.0.0.1", 0, {})
    with ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    with server:
        pass


@contextmanager
def serving(kind: str) -> Iterator[tuple[int, str]]:
    """Yield the port of a server and a path that it answers."""
    if kind == "health":
        with health_server("127.0.0.1", 0, {"/healthz": lambda: {"ok": 1.0}}) as server:
            yield server.port, "/healthz"
    else:
        registry = CollectorRegistry()
        Gauge("some_gauge", "A gauge.", registry=registry).set(7)
        with metrics_server("127.0.0.1", 0, registry) as port:
            yield port, "/metrics"


@pytest.mark.parametrize("kind", ["health", "metrics"])
def test_hundreds_of_unfinished_requests_hold_few_threads_and_no_answer_back(kind: str) -> None:
    before = threading.active_count()
    with serving(kind) as (port, path), ExitStack() as clients:
        for _ in range(300):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(f"GET {path} HTTP/1.1\r\nA: ".encode())
        answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60)
        assert answer.status_code == 200
        assert ("some_gauge 7" in answer.text) == (kind == "metrics")
        few = 2 * http_servers._MOST_CONNECTIONS
        # Those that were closed may still be ending.
        eventually(lambda: threading.active_count() - before < few, within=20, what="few threads")


@pytest.mark.parametrize("kind", ["health", "metrics"])
def test_a_connection_without_a_request_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_servers._Silent, "timeout", 0.05)
    monkeypatch.setattr(http_servers, "_REQUEST_SECONDS", 0.05)
    with serving(kind) as (port, _), socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        assert client.recv(1) == b""
