"""The addresses of the operator's own servers."""

from __future__ import annotations

import socket

import httpx
import pytest

from fastgen_operator.runtime.http_servers import health_server, listening_address
from fastgen_operator.runtime.settings import Settings


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_probes_are_answered_at_addresses_of_both_families(host: str) -> None:
    default = next(field.default for field in Settings.__dataclass_fields__.values() if field.name == "bind_address")
    assert default == "::"
    with health_server(default, 0, {"/healthz": lambda: {"ok": 1.0}}) as server:
        assert httpx.get(f"http://{host}:{server.port}/healthz").json() == {"ok": 1.0}


def test_one_address_is_bound_alone() -> None:
    with health_server("::1", 0, {"/healthz": dict}) as server, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_machine_without_ipv6_is_served_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert listening_address("::") == "0.0.0.0"
    with health_server("::", 0, {"/healthz": dict}) as server:
        assert httpx.get(f"http://127.0.0.1:{server.port}/healthz").status_code == 200
