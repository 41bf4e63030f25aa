"""Hundreds of clients that disconnect at any point are freed completely."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.server.serving import Serving, serving
from support.waiting import HANG_SECONDS, wait_until

STORM = 500
GONE_SECONDS = 5.0
ENDLESS = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("stormy")
    with serving(folder, "--max-sequences", "64", environment={"SCRIPT_STEP_SECONDS": "0.05"}) as server:
        server.wait_status("/ready", 200)
        yield server


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)


def request(body: dict[str, object], length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    fields = f"Host: t\r\nContent-Type: application/json\r\nContent-Length: {length or len(content)}"
    return f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content


def vanish(connection: socket.socket) -> None:
    """Close a connection with a reset, as a crash does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def in_mid_stream(connection: socket.socket) -> None:
    connection.sendall(request(ENDLESS))
    assert connection.recv(12) == b"HTTP/1.1 200"


def before_reading(connection: socket.socket) -> None:
    connection.sendall(request({**ENDLESS, "stream": False}))


def in_mid_body(connection: socket.socket) -> None:
    connection.sendall(request(ENDLESS, length=10_000))


def in_mid_head(connection: socket.socket) -> None:
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-")


def is_quiet(server: Serving, files: int) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_tokens", "kv_cache_usage_ratio")
    idle = all(server.metric(f"fastgen_{name}") == 0 for name in names)
    return idle and server.metric("fastgen_http_requests_open") == 0 and server.num_files() <= files


@pytest.mark.parametrize("leave", [in_mid_stream, before_reading, in_mid_body, in_mid_head])
def test_five_hundred_disconnected_clients_are_freed_within_five_seconds(
    stormy: Serving, leave: Callable[[socket.socket], None]
) -> None:
    stormy.metric("fastgen_http_requests_open")
    files = stormy.num_files() + 1  # the probe's own connection
    with ExitStack() as storm:
        for _ in range(STORM):
            connection = connect(stormy)
            storm.callback(vanish, connection)
            leave(connection)
        if leave in (in_mid_stream, before_reading):
            states = [f"fastgen_num_requests_{state}" for state in ("running", "waiting")]
            wait_until(lambda: sum(map(stormy.metric, states)) == STORM, "all to be queued or running")
    gone = time.monotonic()
    wait_until(lambda: is_quiet(stormy, files), "everything to be freed", GONE_SECONDS)
    print(f"freed after {time.monotonic() - gone:.2f} s")
    assert stormy.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert "Traceback" not in stormy.log


@pytest.mark.slow
def test_clients_that_read_nothing_hold_little_memory_and_are_disconnected_in_the_end(tmp_path: Path) -> None:
    # More than the buffers of a socket hold.
    endless = {"prompt": "go on", "max_tokens": 500, "n": 8, "ignore_eos": True, "stream": True, "logprobs": 20}
    options = ("--max-sequences", "64", "--request-read-seconds", "10")
    with serving(tmp_path, *options, environment={"SCRIPT_BLOCKS": "4096"}) as server, ExitStack() as clients:
        server.wait_status("/ready", 200)
        server.post("/v1/completions", {"prompt": "a"})
        files, before, most = server.num_files(), server.resident_bytes(), 0

        def all_have_left() -> bool:
            nonlocal most
            most = max(most, server.resident_bytes())
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
            return server.num_files() <= files + 1

        for _ in range(2):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request(endless))
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(all_have_left, "all to be disconnected", 120.0)
        wait_until(lambda: is_quiet(server, files + 1), "everything to be freed")
        assert most - before < 64 << 20
        assert "Traceback" not in server.log


def test_repeated_disconnect_storms_do_not_leak_memory(stormy: Serving) -> None:
    def storm() -> int:
        connections = [connect(stormy) for _ in range(100)]
        for connection in connections:
            connection.sendall(request(ENDLESS))
        for connection in connections:
            vanish(connection)
        wait_until(lambda: is_quiet(stormy, 1000), "everything to be freed", GONE_SECONDS)
        return stormy.resident_bytes()

    # An allocator grows for a while, and a leak without end.
    most, num_alike = storm(), 0
    for _ in range(40):
        resident = storm()
        num_alike = num_alike + 1 if resident <= most else 0
        most = max(most, resident)
        if num_alike == 3:
            break
    assert num_alike == 3, "the memory grows with each storm"
    assert "Traceback" not in stormy.log
