"""What a client may send, how much of it, and how slowly."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from engine.server.serving import Serving, serving
from fastgen.server.http.body_limit import MAX_LEVELS, parse


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("strict")
    with serving(folder, "--max-body-size", "100KiB", "--request-read-seconds", "1") as server:
        server.wait_status("/ready", 200)
        yield server


def exchange(server: Serving, *pieces: bytes) -> tuple[int, dict[str, str]]:
    """The status and the error of what a server says to raw bytes, after which it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break  # answered and closed already
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


def test_a_body_that_is_said_to_be_too_large_is_not_read(strict: Serving) -> None:
    status, error = exchange(strict, head(200 << 10))
    assert (status, error["message"]) == (413, "the body is larger than 102400 bytes; send a smaller one")


def test_a_body_that_turns_out_too_large_is_refused(strict: Serving) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert exchange(strict, start, *[chunk] * 5)[0] == 413


@pytest.mark.parametrize("pieces", [
    [b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000],
    [b"GET /health HTTP/1.1\r\n", *[b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(80)]],
    [b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"],
], ids=["one header", "many headers", "the request line"])  # fmt: skip
def test_a_head_that_is_too_large_is_refused(strict: Serving, pieces: list[bytes]) -> None:
    status, error = exchange(strict, *pieces)
    assert (status, error["code"]) == (431, "head_too_large")


@pytest.mark.parametrize(
    "pieces", [[], [b"GET /hea"], [head(100), b"{"]], ids=["nothing", "half a head", "half a body"]
)
def test_a_client_that_does_not_go_on_is_told_and_closed(strict: Serving, pieces: list[bytes]) -> None:
    status, error = exchange(strict, *pieces)
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_connection_may_rest_between_requests_for_longer_than_a_request_may_take(strict: Serving) -> None:
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            connection.settimeout(20)
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(1000)
            connection.settimeout(1.3)
            with pytest.raises(TimeoutError):  # neither a word nor the end
                connection.recv(1000)


def test_what_is_not_http_is_told_so(strict: Serving) -> None:
    status, error = exchange(strict, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert (status, error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    "text", [b"NaN", b'"\\ud800"', b'"\xff"', b"", b"[1,]", b'{"a":1e999}', b"\xef\xbb\xbf{}", b"{} {}"]
)
def test_json_is_taken_to_the_letter(text: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse(text)


def test_json_may_be_nested_so_deep_and_no_deeper() -> None:
    assert parse(b"[" * MAX_LEVELS + b"]" * MAX_LEVELS)
    assert parse(b'["' + b"[" * 5000 + b'"]') == ["[" * 5000]  # in a text they mean nothing
    assert parse(b"[" + b"[1],{}," * 5000 + b"0]")
    for levels in (MAX_LEVELS + 1, 1 << 20):
        with pytest.raises(json.JSONDecodeError, match="nested deeper than 100 levels"):
            parse(b"[" * levels + b"]" * levels)


def test_a_deep_nest_is_the_clients_mistake(scripted: Serving) -> None:
    headers = {"Content-Type": "application/json"}
    refused = scripted.request("POST", "/v1/completions", content=b"[" * (1 << 20), headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the body is not valid JSON: nested deeper than 100 levels"
