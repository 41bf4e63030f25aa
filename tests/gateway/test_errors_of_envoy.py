"""Errors that Envoy itself responds with, in OpenAI's format."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import ClassVar

import pytest

from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose, wait_for_ready
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n"
_MANY = b"".join(b"x-%d: y\r\n" % number for number in range(200))


def exchange(pod: GatewayPod, text: bytes) -> HTTPResponse:
    """Send bytes over a connection of their own; return the response, whose body was read."""
    with socket.create_connection(("127.0.0.1", pod.ports.front), timeout=CLIENT_SECONDS) as client:
        client.sendall(text)
        response = HTTPResponse(client)
        response.begin()
        response.body = response.read()  # type: ignore[attr-defined]
        return response


@pytest.mark.parametrize(
    ("text", "status", "code", "remedy"),
    [
        (b"hello\r\n\r\n", 400, "invalid_http", "correct its request line"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400, "invalid_http", "correct its request line"),
        (_POST + b"Content-Length: -2\r\n\r\n{}", 400, "invalid_http", "correct its request line"),
        (_POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http", "length"),
        (_POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http", "length"),
        (_POST + b"Transfer-Encoding: gzip\r\n\r\n{}", 501, "invalid_http", "other headers"),
        (_POST + b"x y: 1\r\n\r\n", 400, "invalid_http", "other headers"),
        (b"GET /v1/models#part HTTP/1.1\r\nHost: g\r\n\r\n", 400, "invalid_http", "correct its request line"),
        (b"GET /v1/models HTTP/1.0\r\nHost: g\r\n\r\n", 426, "http_version_not_supported", "use HTTP/1.1"),
        (_POST + b"x: " + b"y" * (80 << 10) + b"\r\n\r\n", 431, "headers_too_large", "send shorter or fewer"),
        (_POST + _MANY + b"\r\n", 431, "headers_too_large", "send shorter or fewer"),
        (b"GET /" + b"x" * (80 << 10) + b" HTTP/1.1\r\nHost: g\r\n\r\n", 431, "headers_too_large", "the URL"),
        (_POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 403, "upgrade_not_supported", "plain POST"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else "",
)  # fmt: skip
def test_an_invalid_request_gets_an_error_with_the_remedy(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, text: bytes, status: int, code: str, remedy: str
) -> None:
    """Envoy must not wait for the picker with it: it closes the connection at once."""
    expose(api, pod, "m", replicas[0])
    response = exchange(pod, text)
    assert_error(response, status, code, "invalid_request_error", remedy)
    assert pod.ask("m").status_code == 200
    assert len(replicas[0].received) == 1


def assert_error(response: HTTPResponse, status: int, code: str, kind: str, remedy: str) -> None:
    body: bytes = response.body  # type: ignore[attr-defined]
    assert response.status == status, body
    assert response.headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, kind)
    assert remedy in error["message"]


def ask(pod: GatewayPod) -> HTTPResponse:
    return exchange(pod, _POST + b'Content-Length: 13\r\n\r\n{"model":"m"}')


@contextmanager
def replica_that_sends(text: bytes) -> Iterator[str]:
    """Yield the address of a server that sends these bytes as its response."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    received = b""
                    # All of it: what is not read when the connection closes resets it, and Envoy may lose the response.
                    while not received.endswith(b"}" if received.startswith(b"POST") else b"\r\n\r\n"):
                        if not (part := connection.recv(1 << 16)):
                            break
                        received += part
                    connection.sendall(text)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 502),
        (b"", 503),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (80 << 10) + b"\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", 502),
    ],
    ids=["no HTTP", "nothing", "large headers", "no length"],
)
def test_a_replica_without_a_valid_response_gives_an_error(
    pod: GatewayPod, api: ApiServerStandIn, sent: bytes, status: int
) -> None:
    with replica_that_sends(sent) as address:
        api.deployment("m")
        api.endpoints("m", address)
        wait_for_ready(pod, "m", 1)
        assert_error(ask(pod), status, "replica_failed", "service_unavailable", "try again")


def test_errors_of_a_replica_stay_as_they_are(pod: GatewayPod, api: ApiServerStandIn) -> None:
    for status in (400, 403, 413, 431, 503):
        head = f"HTTP/1.1 {status} No\r\nContent-Type: text/x-test\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
        with replica_that_sends(head.encode() + b"mine") as address:
            api.deployment("m")
            api.endpoints("m", address)
            wait_for_ready(pod, "m", 1)
            response = ask(pod)
            assert (response.status, response.headers["content-type"]) == (status, "text/x-test")
            assert response.body == b"mine"  # type: ignore[attr-defined]
            api.endpoints("m")
            wait_for_ready(pod, "m", 0)


class _ChangedPod(GatewayPod):
    """A gateway whose Envoy has another bootstrap, without a picker."""

    changes: ClassVar[Mapping[str, str]] = {
        "request_headers_timeout: 10s": "request_headers_timeout: 0.2s",
        # Less than it uses.
        "max_heap_size_bytes: 1073741824": "max_heap_size_bytes: 1",
    }


@pytest.fixture(scope="module")
def changed(_api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayPod]:
    started = _ChangedPod(tmp_path_factory.mktemp("changed"), _api.url)
    started.start_envoy()
    wait_until(lambda: started.status(started.ports.status, "/ready") is not None, "Envoy listens", 60)
    yield started
    started.stop()


def test_headers_that_do_not_arrive_get_an_error(changed: GatewayPod) -> None:
    response = exchange(changed, b"GET /v1/models HTTP/1.1\r\nHost")
    assert_error(response, 408, "headers_too_slow", "invalid_request_error", "send the request again")


def test_without_memory_requests_are_refused(changed: GatewayPod) -> None:
    responses = []

    def is_refused() -> bool:
        """Until each of Envoy's threads knows its memory, listener again may get the request."""
        responses.append(exchange(changed, _POST + b"Content-Length: 2\r\n\r\n{}"))
        return b"gateway_overloaded" in responses[-1].body  # type: ignore[attr-defined,no-any-return]

    wait_until(is_refused, "Envoy knows its memory")
    assert_error(responses[-1], 503, "gateway_overloaded", "service_unavailable", "try again")
    assert responses[-1].headers["retry-after"] == "1"
