"""The addresses that the server listens on."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from fastgen.server.http.listening import listen
from fastgen.settings import ServerConfig
from support.waiting import HANG_SECONDS


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_default_is_all_addresses_of_both_families(address: str, count: int) -> None:
    listeners = listen(ServerConfig().host, 0, count)
    try:
        with socket.create_connection((address, listeners[0].getsockname()[1]), timeout=HANG_SECONDS):
            pass
    finally:
        for listener in listeners:
            listener.close()


def test_a_machine_without_ipv6_is_listened_on_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    (listener,) = listen("::", 0, 1)
    with listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_of_one_family_is_listened_on_by_that_family_alone(host: str, family: socket.AddressFamily) -> None:
    (listener,) = listen(host, 0, 1)
    with listener:
        assert listener.family == family
        other = "127.0.0.1" if family == socket.AF_INET6 else "::1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, listener.getsockname()[1]), timeout=HANG_SECONDS)


def test_the_command_line_has_the_same_default() -> None:
    words = [sys.executable, "-c", "from fastgen.commands.main import main; main(['serve', '--help'])"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert f"address to listen on (default: {ServerConfig().host}," in " ".join(said.split())
