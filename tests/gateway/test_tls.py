"""TLS for clients, through the real Envoy."""

from __future__ import annotations

import hashlib
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fastgen_gateway.bootstrap import (
    BOOTSTRAP,
    CERTIFICATE,
    CERTIFICATE_FOLDER,
    CERTIFICATE_PATH,
    Ports,
    bootstrap,
    with_tls,
)
from gateway.certificates import MountedSecret
from gateway.gateway_pod import CLIENT_SECONDS, ENVOY, GatewayPod, expose, with_certificate
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> MountedSecret:
    found = MountedSecret(tmp_path_factory.mktemp("tls") / "certificate")
    found.renew()
    return found


@pytest.fixture(scope="module")
def _encrypted(
    secret: MountedSecret, _api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayPod]:
    started = GatewayPod(tmp_path_factory.mktemp("encrypted"), _api.url, certificate=secret.folder)
    started.start()
    yield started
    started.stop()


@pytest.fixture
def encrypted(_encrypted: GatewayPod, api: ApiServerStandIn) -> GatewayPod:
    """A gateway with TLS, without models."""
    wait_until(lambda: not _encrypted.demand()["deployments"], "the models of the test before are gone")
    del api
    return _encrypted


def served(pod: GatewayPod) -> bytes:
    """Return the SHA-256 of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", pod.ports.front), timeout=CLIENT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return hashlib.sha256(found).digest()


def wait_served(pod: GatewayPod, certificate: x509.Certificate) -> None:
    """Wait until new connections get the certificate."""
    wait_until(lambda: served(pod) == certificate.fingerprint(hashes.SHA256()), "the certificate is served")


def trusting(certificate: x509.Certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=certificate.public_bytes(serialization.Encoding.PEM).decode())


def test_clients_connect_with_tls_and_not_without(
    encrypted: GatewayPod, api: ApiServerStandIn, replicas: Pair, secret: MountedSecret
) -> None:
    expose(api, encrypted, "m", replicas[0])
    certificate = secret.renew()
    wait_served(encrypted, certificate)
    url = f"https://localhost:{encrypted.ports.front}/v1/completions"
    response = httpx.post(url, json={"model": "m"}, verify=trusting(certificate), timeout=CLIENT_SECONDS)
    assert (response.status_code, response.json()["served_by"]) == (200, "a")
    with pytest.raises(httpx.TransportError):
        httpx.post(url.replace("https", "http"), json={"model": "m"}, timeout=CLIENT_SECONDS)


def test_a_renewed_certificate_is_served_without_a_restart_and_streams_run_on(
    encrypted: GatewayPod, api: ApiServerStandIn, replicas: Pair, secret: MountedSecret
) -> None:
    expose(api, encrypted, "m", replicas[0])
    before = secret.renew()
    wait_served(encrypted, before)
    url = f"https://localhost:{encrypted.ports.front}/v1/completions"
    body = {"model": "m", "events": 40, "gap": 0.1}
    with httpx.stream("POST", url, json=body, verify=trusting(before), timeout=CLIENT_SECONDS) as response:
        lines = response.iter_lines()
        next(lines)
        wait_served(encrypted, secret.renew())
        assert "data: [DONE]" in list(lines)


def test_a_certificate_without_its_key_changes_nothing(encrypted: GatewayPod, secret: MountedSecret) -> None:
    before = secret.renew()
    wait_served(encrypted, before)
    secret.renew(matching=False)
    log = encrypted.folder / "envoy.log"
    wait_until(lambda: "Failed to reload certificates" in log.read_text(), "Envoy rejects it")
    assert served(encrypted) == before.fingerprint(hashes.SHA256())
    wait_served(encrypted, secret.renew())


def test_envoy_accepts_the_bootstrap_with_tls(tmp_path: Path, secret: MountedSecret) -> None:
    (tmp_path / "envoy.yaml").write_text(with_certificate(bootstrap(Ports()), tmp_path, secret.folder))
    command = [ENVOY, "--mode", "validate", "-c", tmp_path / "envoy.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tls_changes_nothing_but_the_front_listener() -> None:
    plain, encrypted = yaml.safe_load(BOOTSTRAP.read_text()), yaml.safe_load(with_tls(BOOTSTRAP.read_text()))
    front = encrypted["static_resources"]["listeners"][0]
    assert front["name"] == "front"
    context = front["filter_chains"][0].pop("transport_socket")["typed_config"]["common_tls_context"]
    (source,) = context["tls_certificate_sds_secret_configs"]
    (resource,) = yaml.safe_load(CERTIFICATE.read_text())["resources"]
    assert source["name"] == resource["name"]
    assert source["sds_config"]["path_config_source"]["path"] == CERTIFICATE_PATH
    assert resource["tls_certificate"]["watched_directory"]["path"] == CERTIFICATE_FOLDER
    assert encrypted == plain
