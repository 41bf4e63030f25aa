"""Limits on request size, nesting and receive time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from engine.server.serving import Serving, serving
from fastgen.server.http.body_limit import BodyBudget, BodyLimit
from support.waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("strict"), "--max-body-size", "100KiB") as server:
        server.wait_status("/ready", 200)
        yield server


# A test, too, may be stopped for seconds before it sends something.
READ_SECONDS = 6


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("hasty"), "--request-read-seconds", str(READ_SECONDS)) as server:
        server.wait_status("/ready", 200)
        yield server


def exchange(server: Serving, *pieces: bytes) -> tuple[int, dict[str, str]]:
    """Send raw bytes; return the status and error of the response, after which the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break  # rejected and closed already
        answer = b""
        while True:
            try:
                received = connection.recv(65536)
            except ConnectionResetError:
                break
            if not received:
                break
            answer += received
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def head(length: int) -> bytes:
    fields = f"Host: t\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close"
    return f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def test_a_body_declared_too_large_is_not_read(strict: Serving) -> None:
    status, error = exchange(strict, head(200 << 10))
    assert (status, error["message"]) == (413, "the body is larger than 102400 bytes; send a smaller one")


@pytest.mark.parametrize(("limit", "shown"), [(2 << 20, "2 MiB"), (3 << 19, "1572864 bytes"), (1, "1 bytes")])
async def test_the_limit_is_shown_exactly(limit: int, shown: str) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * (limit + 1)}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()

    with pytest.raises(HTTPException, match=f"larger than {shown}; send") as rejected:
        await BodyLimit(app, limit, BodyBudget(limit))({"type": "http", "headers": []}, receive, send)
    assert rejected.value.status_code == 413


def test_a_chunked_body_that_grows_too_large_is_rejected(strict: Serving) -> None:
    start = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert exchange(strict, start, *[chunk] * 5)[0] == 413


@pytest.mark.parametrize("pieces", [
    [b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000],
    [b"GET /health HTTP/1.1\r\n", *[b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(80)]],
    [b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"],
], ids=["one header", "many headers", "the request line"])  # fmt: skip
def test_an_oversized_head_is_rejected(strict: Serving, pieces: list[bytes]) -> None:
    status, error = exchange(strict, *pieces)
    assert (status, error["code"]) == (431, "head_too_large")


@pytest.mark.parametrize(
    "pieces", [[], [b"GET /hea"], [head(100), b"{"]], ids=["nothing", "half a head", "half a body"]
)
def test_a_stalled_request_gets_408_and_is_closed(hasty: Serving, pieces: list[bytes]) -> None:
    status, error = exchange(hasty, *pieces)
    assert (status, error["code"]) == (408, "request_timeout")


def test_an_idle_connection_outlives_the_read_timeout_between_requests(hasty: Serving) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port)) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            connection.settimeout(HANG_SECONDS)
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(1000)
            connection.settimeout(READ_SECONDS + 0.5)
            with pytest.raises(TimeoutError):  # neither a response nor a close
                connection.recv(1000)


def test_invalid_http_is_rejected_with_400(strict: Serving) -> None:
    status, error = exchange(strict, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert (status, error["code"]) == (400, "invalid_http")
