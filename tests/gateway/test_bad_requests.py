"""Requests that the gateway rejects itself, through the real Envoy."""

from __future__ import annotations

import json
import random
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
_DEEP = 100_000


def connected(pod: GatewayPod) -> socket.socket:
    return socket.create_connection(("127.0.0.1", pod.ports.front), timeout=CLIENT_SECONDS)


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"not JSON", 400, "invalid_json", "the body is not a JSON object: "),
        (b"[1]", 400, "invalid_json", "the body is not a JSON object: "),
        (b'{"model": "m"', 400, "invalid_json", "the body is not a JSON object: "),
        (b'{"model": "m"} {}', 400, "invalid_json", "the body is not a JSON object: "),
        (b'{"messages": []}', 400, "missing_model", "GET /v1/models lists"),
        (b"{}", 400, "missing_model", "GET /v1/models lists"),
        (b'{"model": 1}', 400, "invalid_model", "model is not a string"),
        (b'{"model": null}', 400, "invalid_model", "model is not a string"),
        (b'{"model": {"a": ["m"]}}', 400, "invalid_model", "model is not a string"),
        (b'{"model": "\xff\xfe"}', 400, None, ""),
        (b'{"model": ' + b"[" * _DEEP + b"]" * _DEEP + b"}", 400, "invalid_json", "it is nested too deeply"),
        (b'{"x":' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"}", 400, "invalid_json", "it is nested too deeply"),
        (b'{"model": "other"}', 404, "model_not_found", "the gateway has no model 'other'; use one of: m"),
        (b'{"model": "default/other"}', 404, "model_not_found", "use one of: m"),
        (b'{"model": ""}', 404, "model_not_found", "use one of: m"),
        (b'{"model": "' + b"m" * (1 << 20) + b'"}', 404, "model_not_found", "…'; use one of: m"),
        (b"x" * (20 << 20), 413, "too_large", "the body is larger than 17 MiB, the limit of the gateway"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)  # fmt: skip
def test_a_bad_body_gets_an_error_with_the_remedy(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, body: bytes, status: int, code: str | None, message: str
) -> None:
    expose(api, pod, "m", replicas[0])
    response = pod.post(body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert len(error["message"]) < 1000
    if code is not None:
        assert error["code"] == code
    assert pod.ask("m").status_code == 200
    assert len(replicas[0].received) == 1


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("GET", "/"), ("POST", "/v1/completions"), ("DELETE", "/v1/models")]
)
def test_a_request_without_a_body_reaches_no_replica(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, method: str, path: str
) -> None:
    expose(api, pod, "m", replicas[0])
    response = httpx.request(method, pod.url + path, timeout=CLIENT_SECONDS)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert f"the gateway has no {method} {path}; " in response.json()["error"]["message"]
    assert replicas[0].received == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_post_requests_reach_a_replica(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, method: str
) -> None:
    """Otherwise GET /drain with a body would drain a gateway pod to which an endpoint points."""
    expose(api, pod, "m", replicas[0])
    response = httpx.request(method, f"{pod.url}/drain", json={"model": "m"}, timeout=CLIENT_SECONDS)
    assert response.status_code == 404
    assert f"the gateway has no {method} /drain; send a POST request" in response.json()["error"]["message"]
    assert replicas[0].received == []


@pytest.fixture(scope="module")
def _hasty(_api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayPod]:
    options = ("--body-seconds", "0.5")
    started = GatewayPod(tmp_path_factory.mktemp("hasty"), _api.url, options)
    started.start()
    yield started
    started.stop()
    assert "Traceback" not in started.picker_log, started.picker_log


@pytest.fixture
def hasty(_hasty: GatewayPod, api: ApiServerStandIn) -> GatewayPod:
    """A gateway that soon rejects a request whose body does not arrive, without models."""
    wait_until(lambda: not _hasty.demand()["deployments"], "the models of the test before are gone")
    del api
    return _hasty


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 17000000\r\n\r\n",
        b"Content-Length: 17000000\r\n\r\n" + b"x" * 1_000_000,
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
    ids=["nothing", "a part", "a chunk"],
)
def test_a_body_that_does_not_arrive_ends_its_request(
    hasty: GatewayPod, api: ApiServerStandIn, replicas: Pair, sent: bytes
) -> None:
    """Envoy keeps what has arrived of a body in memory, and the client may be gone."""
    expose(api, hasty, "m", replicas[0])
    with connected(hasty) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n" + sent)
        with client.makefile("rb") as answer:
            received = answer.read()  # to the end of the connection
    assert received.startswith(b"HTTP/1.1 408")
    assert b"the body has not arrived within 0.5 s; send it again, or a shorter one" in received
    assert replicas[0].received == []
    # On a busy machine, a body may take longer.
    wait_until(lambda: hasty.ask("m").status_code == 200, "another request is answered")


def test_large_bodies_beyond_the_limit_are_refused_before_they_arrive(
    api: ApiServerStandIn, replicas: Pair, tmp_path: Path
) -> None:
    """Otherwise some tens of the largest at once would exceed the picker's memory limit."""
    pod = GatewayPod(tmp_path, api.url, ("--max-bodies-bytes", "1000000"))
    pod.start()
    try:
        expose(api, pod, "m", replicas[0])
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(pod)) for _ in range(2)]
            for client in clients:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 900000\r\n\r\n")
            # Whichever the picker sees first, its body is expected, and the other one has no room.
            refused, _, _ = select.select(clients, [], [], CLIENT_SECONDS)
            assert len(refused) == 1
            response = HTTPResponse(refused[0])
            response.begin()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert json.loads(response.read())["error"]["code"] == "bodies_full"
            assert pod.ask("m").status_code == 200, "a small one is received"
            assert select.select([client for client in clients if client not in refused], [], [], 0)[0] == []
        large = {"model": "m", "prompt": "x" * 900_000}
        wait_until(lambda: pod.post(large).status_code == 200, "the other client has left")
    finally:
        pod.stop()


class _FewConnections(GatewayPod):
    """A gateway that accepts four connections of clients at a time."""

    changes: ClassVar[Mapping[str, str]] = {
        **GatewayPod.changes,
        "max_active_downstream_connections: 20000": "max_active_downstream_connections: 4",
    }


def test_clients_that_hold_all_connections_keep_no_probe_from_an_answer(api: ApiServerStandIn, tmp_path: Path) -> None:
    """Otherwise the kubelet would end Envoy, with all streams."""
    pod = _FewConnections(tmp_path, api.url)
    pod.start()
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(pod)) for _ in range(5)]
            closed, _, _ = select.select(clients, [], [], CLIENT_SECONDS)
            assert [client.recv(1) for client in closed] == [b""], "one is too many"
            assert pod.status(pod.ports.status, "/ready") == 200
    finally:
        pod.stop()


def test_an_unknown_model_among_many_names_some(pod: GatewayPod, api: ApiServerStandIn) -> None:
    for number in range(30):
        api.deployment(f"model-{number:02d}")
    wait_until(lambda: len(pod.demand()["deployments"]) == 30, "all are known")
    message = pod.ask("none").json()["error"]["message"]
    assert "model-19 and 10 more" in message
    assert "model-20" not in message


def test_without_models_the_error_says_how_to_expose_one(pod: GatewayPod) -> None:
    message = pod.ask("none").json()["error"]["message"]
    assert message == "the gateway has no model 'none'; expose a FastGenDeployment with spec.gateway.expose: true"


def test_a_body_of_16_mib_passes(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", replicas[0])
    body = json.dumps({"model": "m", "prompt": "x" * ((16 << 20) - 64)}).encode()
    assert pod.post(body).json()["bytes"] == len(body)


def test_random_bytes_break_nothing(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", replicas[0])
    rng = random.Random(32)
    text = json.dumps({"model": "m", "messages": [{"role": "user", "content": 'héé "quoted"'}]}).encode()
    statuses = set()
    for _ in range(60):
        body = bytearray(text)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        response = pod.post(bytes(body))
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404, 500), response.text
    assert {200, 400} <= statuses
    assert pod.ask("m").status_code == 200
