"""Requests that wait in the real Envoy until a replica is ready."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose, wait_for_ready
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
_OPEN = 'envoy_http_downstream_rq_active{envoy_http_conn_manager_prefix="front"}'


def held(pod: GatewayPod, name: str = "m") -> int:
    number: int = pod.demand()["deployments"][f"default/{name}"]["held"]
    return number


def oldest(pod: GatewayPod, name: str = "m") -> float:
    seconds: float = pod.demand()["deployments"][f"default/{name}"]["oldestHeldSeconds"]
    return seconds


def test_a_request_without_a_ready_replica_waits_for_one(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m")
    clients = HeldClients(pod.ports.front, 1, {"model": "m", "prompt": "x" * 400})
    wait_until(lambda: held(pod) == 1, "the request is held")
    demand = pod.demand()["deployments"]["default/m"]
    assert demand["heldTokens"] == 101
    assert demand["oldestHeldSeconds"] > 0
    assert demand["idleSeconds"] == 0
    api.endpoints("m", replicas[0].address)
    assert clients.wait() == {200: 1}
    wait_until(lambda: pod.demand()["deployments"]["default/m"]["idleSeconds"] > 0, "the model is idle")
    assert pod.demand()["deployments"]["default/m"]["held"] == 0


def test_a_model_that_got_no_request_has_no_idle_time(pod: GatewayPod, api: ApiServerStandIn) -> None:
    expose(api, pod, "m")
    demand = pod.demand()
    assert demand["deployments"]["default/m"] == {
        "held": 0, "heldTokens": 0, "oldestHeldSeconds": 0.0, "idleSeconds": None, "readyReplicas": 0, "running": 0,
    }  # fmt: skip
    assert demand["startedSeconds"] > 0


def test_the_first_ready_replica_gets_held_requests_by_its_capacity(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a = replicas[0]
    expose(api, pod, "m")
    clients = HeldClients(pod.ports.front, 60, {"model": "m", "seconds": 0.05})
    wait_until(lambda: held(pod) == 60, "all requests are held")
    api.endpoints("m", a.address)
    assert clients.wait() == {200: 60}
    # Without metrics, a replica gets so many at a time.
    assert 1 < a.most_running <= 8


def test_500_held_requests_survive_a_killed_picker(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m")
    clients = HeldClients(pod.ports.front, 500, {"model": "m"})
    wait_until(lambda: held(pod) == 500, "all requests are held")
    pod.kill_picker()
    pod.start_picker()
    pod.wait_ready()
    wait_until(lambda: held(pod) == 500, "all requests are held anew")
    assert clients.num_ended == 0
    api.endpoints("m", *(replica.address for replica in replicas))
    assert clients.wait() == {200: 500}
    assert sum(len(replica.received) for replica in replicas) == 500


def test_a_request_that_arrives_without_a_picker_waits_for_it_and_streams_run_on(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m", replicas[0])
    body = {"model": "m", "events": 40, "gap": 0.1}
    with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
        lines = response.iter_lines()
        next(lines)
        pod.kill_picker()
        clients = HeldClients(pod.ports.front, 3, {"model": "m"})
        pod.start_picker()
        pod.wait_ready()
        assert clients.wait() == {200: 3}
        assert "data: [DONE]" in list(lines)


def test_without_a_picker_a_client_cannot_choose_the_replica(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a, b = replicas
    expose(api, pod, "m", a)
    pod.kill_picker()
    try:
        header = f"x-gateway-destination-endpoint: {b.address}"
        clients = HeldClients(pod.ports.front, 1, {"model": "m"}, header)
    finally:
        pod.start_picker()
        pod.wait_ready()
    assert clients.wait() == {200: 1}
    assert (len(a.received), len(b.received)) == (1, 0)


class _HastyPod(GatewayPod):
    """A gateway whose Envoy waits a second for the picker."""

    changes: ClassVar[Mapping[str, str]] = {**GatewayPod.changes, "message_timeout: 5s\n": "message_timeout: 1s\n"}


def test_a_hold_outlasts_envoys_timeout_for_the_picker(api: ApiServerStandIn, replicas: Pair, tmp_path: Path) -> None:
    hasty = _HastyPod(tmp_path, api.url)
    hasty.start()
    try:
        expose(api, hasty, "m")
        clients = HeldClients(hasty.ports.front, 3, {"model": "m"})
        # Until then, Envoy may ask a slow picker again. A request has no timeout from before a change any more.
        changed = lambda: _stat(hasty, "envoy_http_ext_proc_override_message_timeout_received")  # noqa: E731
        wait_until(lambda: changed() >= 3 and held(hasty) == 3, "Envoy knows that they are held")
        before = _stat(hasty, "envoy_http_ext_proc_message_timeouts")
        since = oldest(hasty)
        wait_until(lambda: oldest(hasty) > since + 2, "2 s have passed")
        assert held(hasty) == 3
        assert _stat(hasty, "envoy_http_ext_proc_message_timeouts") == before
        api.endpoints("m", replicas[0].address)
        assert clients.wait() == {200: 3}
    finally:
        hasty.stop()


def test_a_held_request_ends_when_its_client_leaves(pod: GatewayPod, api: ApiServerStandIn) -> None:
    expose(api, pod, "m")
    with socket.create_connection(("127.0.0.1", pod.ports.front)) as client:
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n{"model":"m"}')
        wait_until(lambda: held(pod) == 1, "the request is held")
    wait_until(lambda: held(pod) == 0, "it is not held any more")


def test_a_request_held_for_a_deployment_that_is_deleted_is_rejected(pod: GatewayPod, api: ApiServerStandIn) -> None:
    expose(api, pod, "m")
    clients = HeldClients(pod.ports.front, 1, {"model": "m"})
    wait_until(lambda: held(pod) == 1, "the request is held")
    api.clear()
    assert clients.wait() == {404: 1}
    assert b"the gateway has no model 'm'" in clients.bodies[0]


@pytest.fixture(scope="module")
def _small(_api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayPod]:
    options = ("--max-held-requests", "2", "--max-held-bytes", "1000")
    started = GatewayPod(tmp_path_factory.mktemp("small"), _api.url, options)
    started.start()
    yield started
    started.stop()


@pytest.fixture
def small(_small: GatewayPod, api: ApiServerStandIn) -> GatewayPod:
    """A gateway that holds few requests, without models."""
    wait_until(lambda: not _small.demand()["deployments"], "the models of the test before are gone")
    del api
    return _small


def test_requests_beyond_the_number_are_rejected(small: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, small, "m")
    clients = HeldClients(small.ports.front, 5, {"model": "m"})
    wait_until(lambda: clients.num_ended == 3, "two are held")
    assert clients.statuses == {429: 3}
    assert all(b"the gateway holds 2 requests, its limit" in body for body in clients.bodies)
    api.endpoints("m", replicas[0].address)
    assert clients.wait() == {429: 3, 200: 2}


def test_a_full_gateway_still_holds_a_request_for_another_model(
    small: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    for model in "mn":
        expose(api, small, model)
    many = HeldClients(small.ports.front, 2, {"model": "m"})
    wait_until(lambda: held(small) == 2, "the gateway is full")
    few = HeldClients(small.ports.front, 1, {"model": "n"})
    wait_until(lambda: many.num_ended == 1, "one has lost its place")
    assert many.statuses == {429: 1}
    assert b"this request was displaced by one for a model with fewer held requests" in many.bodies[0]
    for model, replica in zip("mn", replicas, strict=True):
        api.endpoints(model, replica.address)
    assert many.wait() == {429: 1, 200: 1}
    assert few.wait() == {200: 1}


def test_a_request_held_too_long_is_rejected(api: ApiServerStandIn, tmp_path: Path) -> None:
    impatient = GatewayPod(tmp_path, api.url, ("--hold-seconds", "0.5"))
    impatient.start()
    try:
        expose(api, impatient, "m")
        response = impatient.ask("m")
    finally:
        impatient.stop()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"
    assert response.json()["error"]["code"] == "no_ready_replica"
    assert "no replica had room for the request within 0.5 s" in response.json()["error"]["message"]


def test_bodies_beyond_the_bytes_are_rejected(small: GatewayPod, api: ApiServerStandIn) -> None:
    expose(api, small, "m")
    response = small.ask("m", prompt="x" * 1000)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "10"
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_picker_that_hangs_is_found(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", replicas[0])
    pod.signal_picker(signal.SIGSTOP)
    clients = HeldClients(pod.ports.front, 1, {"model": "m"})
    try:
        wait_until(lambda: _stat(pod, _OPEN) > 0, "the request is with Envoy")
    finally:
        pod.signal_picker(signal.SIGCONT)
    assert clients.wait() == {200: 1}
    wait_for_ready(pod, "m", 1)


def _stat(pod: GatewayPod, name: str) -> float:
    """Return the sum of a metric of Envoy; `name` may have its first labels."""
    lines = pod.envoy_metrics().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
