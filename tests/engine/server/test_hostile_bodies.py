"""No body holds up others, whatever it contains: probes are answered and streams go on (decisions 022 and 042)."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.server.hostile import BODIES, Body
from engine.server.loop_probe import longest_hold
from engine.server.serving import Serving, serving
from fastgen.link.watchdog import seconds_waited
from support.waiting import HANG_SECONDS

# These limits are those of a processor that parses REFERENCE in so many seconds. One that does other work beside it, or
# is an older one, has as much more time.
REFERENCE, REFERENCE_SECONDS = json.dumps([{"role": "user", "content": "a"}] * 20_000), 0.008
# Seconds of one turn of the event loop. Before decision 042, some of these bodies took three.
MOST_HELD = 0.15
# Seconds to answer a probe; and those by which a stream's longest gap may grow.
MOST_PROBED, MOST_ADDED = 0.3, 0.15
CLIENTS, TIMES = 3, 2
# What a body causes, it causes each time; what the machine causes, it does not.
MOST_ATTEMPTS = 40


@dataclass
class Delays:
    """The longest times, in seconds, to answer a probe and between two tokens of a stream."""

    probe: float = 0.0
    gap: float = 0.0


class Clock:
    """Elapsed seconds without those in which a thread of the server, the engine or the client had to wait for a core.

    On a busy machine these are nearly all, whatever the server does: also the event loop waits if the thread that holds
    the interpreter's lock has no core. They may overlap, so the clock may go back.
    """

    def __init__(self, server: Serving) -> None:
        self._tasks = [Path(f"/proc/{process}/task") for process in (server.process.pid, server.engine_pid())]
        # By path, also of threads that have ended: their time must not come back.
        self._waited: dict[Path, float] = {}
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            for thread in itertools.chain(*(tasks.iterdir() for tasks in self._tasks)):
                with suppress(FileNotFoundError, ProcessLookupError):
                    self._waited[thread] = seconds_waited(thread)
            waited = sum(self._waited.values()) + seconds_waited(Path("/proc/thread-self"))
        return time.monotonic() - waited


class Watcher:
    """A client that streams and one that probes, endlessly, and what they see."""

    def __init__(self, server: Serving, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._seen = Delays()
        self._ends = False
        self._has_token = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._stream, self._probe)]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        assert self._has_token.wait(HANG_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        for thread in self._threads:
            thread.join()

    def seen(self) -> Delays:
        """Return the longest delays since the last call, after another token."""
        self._has_token.clear()
        assert self._has_token.wait(HANG_SECONDS)
        seen, self._seen = self._seen, Delays()
        return seen

    def _stream(self) -> None:
        body = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True, "priority": -1}
        while not self._ends:
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=HANG_SECONDS)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read1()
            last = self._clock.now()
            while not self._ends and response.read1():
                now = self._clock.now()
                self._seen.gap, last = max(self._seen.gap, now - last), now
                self._has_token.set()
            connection.close()

    def _probe(self) -> None:
        while not self._ends:
            began = self._clock.now()
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=HANG_SECONDS)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            self._seen.probe = max(self._seen.probe, self._clock.now() - began)
            connection.close()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path, Clock]]:
    folder = tmp_path_factory.mktemp("probed")
    probe = folder / "longest"
    environment = {"LOOP_PROBE": str(probe), "SCRIPT_BLOCKS": "4096", "SCRIPT_STEP_SECONDS": "0.005"}
    with serving(folder, "--max-model-length", "8192", environment=environment) as server:
        server.wait_status("/ready", 200)
        server.post("/v1/completions", {"prompt": "a"})
        yield server, probe, Clock(server)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_hostile_body_holds_up_neither_the_event_loop_nor_probes_nor_streams(
    probed: tuple[Serving, Path, Clock], body: Body
) -> None:
    server, probe, clock = probed
    path, content = body[0], body[1]()
    seen: list[tuple[float, float, float, float]] = []
    with Watcher(server, clock) as watcher:
        while len(seen) < MOST_ATTEMPTS and sum(map(is_short, seen)) < 2:
            watcher.seen()
            time.sleep(0.1)
            before = watcher.seen()
            parsing = seconds_to_parse()
            longest_hold(probe)
            post_together(server, path, content)
            held, after = longest_hold(probe), watcher.seen()
            slowness = max(1.0, (parsing + seconds_to_parse()) / 2 / REFERENCE_SECONDS)
            seen.append((held, after.probe, after.gap - before.gap, slowness))
    assert sum(map(is_short, seen)) == 2, f"held, probe, added to the gap, slowness: {seen}"


def is_short(seen: tuple[float, float, float, float]) -> bool:
    """Return whether a body held up neither the loop nor a probe nor a stream, on a processor so slow."""
    held, probed, added, slowness = seen
    return held < MOST_HELD * slowness and probed < MOST_PROBED * slowness and added < MOST_ADDED * slowness


def seconds_to_parse() -> float:
    """Return the seconds of processor time to parse REFERENCE now, the median of several times."""
    taken: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        json.loads(REFERENCE)
        taken.append(time.thread_time() - began)
    return sorted(taken)[2]


def post_together(server: Serving, path: str, content: bytes) -> None:
    """Have several clients post a body several times, each on a connection of its own."""
    statuses = list[int]()

    def post() -> None:
        for _ in range(TIMES):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_SECONDS)
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            statuses.append(connection.getresponse().status)
            connection.close()

    senders = [threading.Thread(target=post) for _ in range(CLIENTS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert len(statuses) == CLIENTS * TIMES
    assert set(statuses) <= {200, 400, 404}
