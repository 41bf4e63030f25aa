"""A gateway pod of any IP family: clients, probes and replicas with IPv4 and with IPv6 addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, wait_for_ready
from gateway.stand_ins import ApiServerStandIn, LoopThread, ReplicaStandIn

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
def everywhere(api: ApiServerStandIn, tmp_path: Path) -> Iterator[GatewayPod]:
    """A gateway that listens as it does in a pod."""
    started = GatewayPod(tmp_path, api.url, address=None)
    started.start()
    yield started
    started.stop()


def test_clients_probes_and_replicas_may_have_addresses_of_both_families(
    everywhere: GatewayPod, api: ApiServerStandIn, loop: LoopThread
) -> None:
    replica = ReplicaStandIn(loop, "six", "::1")
    host, _, port = replica.address.rpartition(":")
    labels = {"kubernetes.io/service-name": "m"}
    slices = {"endpoints": [{"addresses": [host]}], "ports": [{"name": "http", "port": int(port)}]}
    api.deployment("m")
    api.put("endpointslices", "default", "m", {"addressType": "IPv6", **slices}, labels=labels)
    wait_for_ready(everywhere, "m", 1)
    for address in ("127.0.0.1", "[::1]"):
        with httpx.Client(timeout=CLIENT_SECONDS) as client:
            response = client.post(f"http://{address}:{everywhere.ports.front}/v1/completions", json={"model": "m"})
            assert (response.status_code, response.json()["served_by"]) == (200, "six")
            assert client.get(f"http://{address}:{everywhere.ports.status}/ready").status_code == 200
            assert client.get(f"http://{address}:{everywhere.http_port}/readyz").status_code == 200
    replica.stop()
