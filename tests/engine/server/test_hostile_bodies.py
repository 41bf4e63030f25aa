"""No body holds the event loop, whatever it contains: probes are answered and streams go on (decision 042)."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.server.hostile import BODIES, Body
from engine.server.loop_probe import longest_hold
from engine.server.serving import Serving, serving

# Seconds of one turn of the event loop. Before decision 042, some of these bodies took three.
MOST_HELD = 0.15
CLIENTS, TIMES = 3, 2


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    folder = tmp_path_factory.mktemp("probed")
    probe = folder / "longest"
    environment = {"LOOP_PROBE": str(probe), "SCRIPT_BLOCKS": "4096"}
    with serving(folder, "--max-model-length", "8192", environment=environment) as server:
        server.wait_status("/ready", 200)
        server.post("/v1/completions", {"prompt": "a"})
        yield server, probe


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_hostile_body_does_not_hold_the_event_loop(probed: tuple[Serving, Path], body: Body) -> None:
    server, probe = probed
    path, content, statuses = body[0], body[1](), list[int]()
    longest_hold(probe)
    senders = [threading.Thread(target=lambda: statuses.extend(post(server, path, content))) for _ in range(CLIENTS)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert server.get("/health").status_code == 200  # raises after ten seconds
    assert len(statuses) == CLIENTS * TIMES
    assert set(statuses) <= {200, 400, 404}
    assert longest_hold(probe) < MOST_HELD


def post(server: Serving, path: str, content: bytes) -> list[int]:
    """Return the statuses of several requests, each on a connection of its own."""
    statuses = []
    for _ in range(TIMES):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        statuses.append(connection.getresponse().status)
        connection.close()
    return statuses
