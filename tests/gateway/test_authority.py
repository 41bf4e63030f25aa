"""The picker trusts the API server's authority as its file is now: it is renewed while the picker runs."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cluster.controlplane import free_ports
from fastgen_gateway.cluster.api_server import ApiServer, Credentials
from gateway.certificates import MountedSecret


class Served:
    """An API server with TLS and no objects, whose authority has a file.

    Attributes:
        url: of the server.
        secret: its certificate.
        ca_file: what the picker trusts.
    """

    def __init__(self, folder: Path) -> None:
        self.secret, self.ca_file = MountedSecret(folder / "served"), folder / "ca.crt"
        self.url = f"https://localhost:{free_ports(1)[0]}"
        self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def renew(self) -> None:
        """Use another certificate of another authority for new connections."""
        self.secret.renew()
        self.tls.load_cert_chain(self.secret.folder / "tls.crt", self.secret.folder / "tls.key")

    def publish(self) -> None:
        """Write the authority's file."""
        self.ca_file.write_bytes((self.secret.folder / "tls.crt").read_bytes())


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []}, headers={"Connection": "close"})

    made = Served(tmp_path)
    made.renew()
    made.publish()
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "localhost", int(made.url.rpartition(":")[2]), ssl_context=made.tls).start()
    yield made
    await runner.cleanup()


async def read(server: ApiServer) -> list[str]:
    return [version async for version, _ in server.pages("/api/v1/pods", None)]


async def test_a_renewed_authority_is_trusted_without_a_restart(served: Served) -> None:
    async with ApiServer(Credentials(served.url, ca_file=served.ca_file)) as server:
        assert await read(server) == ["7"]
        served.renew()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await read(server)
        served.publish()
        assert await read(server) == ["7"]


@pytest.mark.parametrize("content", [b"", b"-----BEGIN", None])
async def test_a_file_that_cannot_be_used_changes_nothing(
    served: Served, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with ApiServer(Credentials(served.url, ca_file=served.ca_file)) as server:
        if content is None:
            served.ca_file.unlink()
        else:
            served.ca_file.write_bytes(content)
        assert await read(server) == ["7"]
        assert "keeping the previous one" in caplog.text
        served.renew()
        served.publish()
        assert await read(server) == ["7"]


async def test_at_the_start_the_file_must_be_usable(served: Served) -> None:
    served.ca_file.write_bytes(b"")
    with pytest.raises(ssl.SSLError):
        async with ApiServer(Credentials(served.url, ca_file=served.ca_file)):
            pass
