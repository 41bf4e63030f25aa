"""Several API processes in front of one engine: to clients and operators they are one server."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.server.serving import Serving, serving
from engine.server.test_queue_limit import Ignoring, send, status_of
from fastgen import exit_codes
from fastgen.core.request import FinishReason
from fastgen.core.stats import SchedulerStats, StepStats, StepTrace
from fastgen.core.step_times import StepCoefficients
from fastgen.engine.channel import Recipients
from fastgen.link.in_flight import InFlight
from fastgen.link.messages import StepReport, TokenOutput
from fastgen.link.shared_counts import SharedCounts
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.served_model import ServedModel
from support.waiting import HANG_SECONDS, wait_until

NUM = 2
SLOW = {"SCRIPT_STEP_SECONDS": "0.02"}
ENDLESS: dict[str, object] = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True}
OPTIONS = ("--api-processes", str(NUM))
KILLED = "fastgen: error: the engine process was killed by SIGKILL (out of memory?)"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = (*OPTIONS, "--max-sequences", "2", "--max-queued-requests", "8", "--ui", "--metrics-compat", "vllm")
    with serving(tmp_path_factory.mktemp("several"), *options, environment=SLOW) as server:
        server.wait_status("/ready", 200)
        yield server


def children(server: Serving) -> dict[str, int]:
    """Return the pids of the server's children: the engine and the second API process."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    assert len(pids) == NUM
    return {"engine" if b"scripted_engine" in command else "api": int(pid) for pid, command in commands.items()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def process_of(server: Serving, connection: socket.socket, pids: list[int]) -> int:
    """Return which of the API processes has accepted a connection."""
    here, there = (f":{port:04X}" for port in (connection.getsockname()[1], server.port))
    found: list[int] = []

    def is_accepted() -> bool:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(there) and line[2].endswith(here)}
        for pid in pids:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    if os.readlink(descriptor) in sockets:
                        found.append(pid)
        return bool(found)

    wait_until(is_accepted, "the connection to be accepted")
    return found[0]


def connected(server: Serving, connections: ExitStack, num: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return `num` connections to the first API process, and as many to the second."""
    pids = [server.process.pid, children(server)["api"]]
    opened: tuple[list[socket.socket], list[socket.socket]] = ([], [])
    while any(len(own) < num for own in opened):
        connection = connections.enter_context(
            socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
        )
        own = opened[pids.index(process_of(server, connection, pids))]
        if len(own) < num:
            own.append(connection)
        else:
            connection.close()
    return opened


def get(connection: socket.socket, path: str) -> tuple[int, str]:
    """Return the status and text of a GET on this connection, which stays open."""
    client = http.client.HTTPConnection("test")
    client.sock = connection
    client.request("GET", path)
    response = client.getresponse()
    return response.status, response.read().decode()


def post(connection: socket.socket, max_tokens: int) -> None:
    """Send a completion request. SCRIPT_END can end it early."""
    content = json.dumps({**ENDLESS, "max_tokens": max_tokens, "ignore_eos": False}).encode()
    fields = f"Host: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)


def begin(connection: socket.socket, max_tokens: int = 2000) -> None:
    """Send a completion request and wait for its status."""
    post(connection, max_tokens)
    assert status_of(connection) == 200


def rest_of(connection: socket.socket) -> bytes:
    """Return what is received until the end of the response's body, or of the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while not received.endswith(b"0\r\n\r\n") and (part := connection.recv(65536)):
            received += part
    return received


def test_a_scrape_of_any_process_shows_all(several: Serving) -> None:
    with ExitStack() as connections:
        scraped = [each for (each,) in connected(several, connections, 1)]
        posted = [each for own in connected(several, connections, 2) for each in own]

        def scrapes(name: str, before: str = "fastgen_") -> list[float]:
            texts = [get(connection, f"/metrics?name[]={before}{name}") for connection in scraped]
            assert [status for status, _ in texts] == [200] * NUM
            lines = [[line for line in text.splitlines() if line[0] != "#"] for _, text in texts]
            return [sum(float(line.split()[-1]) for line in of_one) for of_one in lines]

        for connection in posted:
            begin(connection, 5)
            rest_of(connection)
        # The first process learns by itself what the engine has done for the second.
        wait_until(lambda: several.metric("fastgen_scheduled_tokens_total", phase="decode") == 4 * 4, "all reports")
        assert scrapes("generation_tokens_total") == [20, 20]
        assert scrapes("time_to_first_token_seconds_count") == [4, 4]
        prompts = scrapes("arrived_prompt_tokens_total")
        assert scrapes("step_tokens_sum") == [prompts[0] + 4 * 4] * NUM, "of the engine, not once per process"
        assert scrapes("kv_cache_capacity_tokens") == [64 * 64] * NUM
        assert scrapes("cache_config_info") == [1, 1]
        assert scrapes("generation_tokens_total", "vllm:") == [20, 20]
        several.post("/v1/completions", {"model": "unknown", "prompt": "a"})
        assert scrapes("request_rejected_total") == [1, 1]


def test_the_queue_and_the_load_are_those_of_all_processes(several: Serving) -> None:
    with ExitStack() as connections:
        asked = [each for (each,) in connected(several, connections, 1)]
        burst = [connections.enter_context(send(several, ENDLESS)) for _ in range(24)]
        statuses = [status_of(connection) for connection in burst]
        assert (statuses.count(200), statuses.count(429)) == (2 + 8, 24 - 2 - 8)
        pids = [several.process.pid, children(several)["api"]]
        assert {process_of(several, connection, pids) for connection in burst} == set(pids)
        wait_until(lambda: several.metric("fastgen_num_requests_waiting") == 8, "a full queue")
        for connection in asked:  # a rejected request ends after its response
            wait_until(lambda of=connection: json.loads(get(of, "/load")[1])["server_load"] == 10, "the load")  # type: ignore[misc]
        assert several.metric("fastgen_http_requests_open") == 10
    wait_until(lambda: several.metric("fastgen_num_requests_running") == 0, "the clients' sequences to be freed")
    wait_until(lambda: several.get("/load").json()["server_load"] == 0, "their requests to be closed")


def test_the_page_of_any_process_shows_the_steps_of_all(several: Serving) -> None:
    def steps(connection: socket.socket) -> list[dict[str, Any]]:
        events = connection.makefile("rb")
        updates = (json.loads(line[6:]) for line in events if line.startswith(b"data: "))
        limits = next(updates)
        assert limits["num_blocks"] == 64
        return next(update["steps"] for update in updates if any(step["decodes"] for step in update["steps"]))

    with ExitStack() as connections:
        watching = [each for (each,) in connected(several, connections, 1)]
        for connection in watching:
            connection.sendall(b"GET /ui/steps HTTP/1.1\r\nHost: test\r\n\r\n")
        begin(connected(several, connections, 1)[1][0])
        owners = [{owner for step in steps(each) for owner in step["decodes"]} for each in watching]
        assert owners[0] == owners[1]
        assert len(owners[0]) == 1
    wait_until(lambda: several.metric("fastgen_num_requests_running") == 0, "the client's sequence to be freed")


def test_a_port_in_use_is_refused_despite_sharing(several: Serving, tmp_path: Path) -> None:
    with serving(tmp_path, *OPTIONS, port=several.port) as second:
        assert second.wait_exit() == exit_codes.BAD_CONFIGURATION
        assert "choose another address or port" in second.log


def test_a_killed_process_ends_the_server_after_the_requests_of_the_others(tmp_path: Path) -> None:
    end = tmp_path / "end"
    environment = {**SLOW, "SCRIPT_END": str(end), "SCRIPT_IDLE_SECONDS": "60"}
    with (
        serving(tmp_path, *OPTIONS, "--max-sequences", "2", environment=environment) as server,
        ExitStack() as connections,
    ):
        server.wait_status("/ready", 200)
        (scraped, running, waiting), lost = connected(server, connections, 3)
        begin(lost[0])
        begin(running)
        wait_until(lambda: server.metric("fastgen_num_requests_running") == 2, "all places to be taken")
        begin(lost[1])
        begin(waiting, 5)
        wait_until(lambda: server.metric("fastgen_num_requests_waiting") == 2, "the others to wait")
        os.kill(children(server)["api"], signal.SIGKILL)
        assert b'"finish_reason":"length"' in rest_of(waiting), "the engine frees what the process had started"
        waiting.close()  # the server waits for connections without a request
        for connection in lost[:2]:
            assert b"[DONE]" not in rest_of(connection)
        status, text = get(scraped, "/metrics")
        assert (status, "metrics_missing" in text) == (503, True), "without its part, counters would seem to fall"
        end.touch()
        assert b'"finish_reason":"stop"' in rest_of(running)
        running.close()
        assert server.wait_exit() == exit_codes.FAILED
        assert server.log.splitlines()[-1] == "fastgen: error: API process 1 was killed by SIGKILL (out of memory?)"


def test_sigterm_drains_all_processes_and_metrics_stay_complete(tmp_path: Path) -> None:
    end = tmp_path / "end"
    environment = {**SLOW, "SCRIPT_END": str(end)}
    with serving(tmp_path, *OPTIONS, environment=environment) as server, ExitStack() as connections:
        server.wait_status("/ready", 200)
        first, second = connected(server, connections, 2)
        other = children(server)["api"]
        begin(first[0])
        begin(first[1], 50)
        for connection in second:
            begin(connection, 50)
        os.kill(other, signal.SIGINT)  # as Ctrl-C in a terminal: only the first process decides
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.status("/ready") in (503, None), "/ready 503")
        for connection in (*second, first[1]):
            assert b'"finish_reason":"length"' in rest_of(connection)
        wait_until(lambda: not is_running(other), "the idle process to end")
        assert server.metric("fastgen_request_success_total") == 3
        assert server.metric("fastgen_generation_tokens_total") > 150
        end.touch()
        assert b'"finish_reason":"stop"' in rest_of(first[0])
        assert server.wait_exit() == 0
        assert server.log.count("received SIGTERM") == server.log.count("stopped") == 1


def test_all_processes_see_that_the_engine_hangs_and_the_server_exits_with_the_cause(tmp_path: Path) -> None:
    # The engine is late after 10 s and hangs after 20 s: the first steps may take ten times this limit.
    options = (*OPTIONS, "--step-timeout-seconds", "2")
    with serving(tmp_path, *options) as server, ExitStack() as connections:
        server.wait_status("/ready", 200)
        asked, (_, working) = connected(server, connections, 2)
        os.kill(children(server)["engine"], signal.SIGSTOP)
        post(working, 20)
        wait_until(lambda: get(asked[0], "/ready")[0] == 503, "/ready 503 of the process without a request", 40)
        assert "the engine may hang" in get(asked[0], "/ready")[1]
        assert b'"code":"engine_dead"' in rest_of(working)
        assert server.wait_exit() == exit_codes.HUNG
        assert server.log.splitlines()[-1].startswith("fastgen: error: the engine hangs: ")


def test_a_dead_engine_ends_the_streams_of_all_processes_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, *OPTIONS, environment=SLOW) as server, ExitStack() as connections:
        server.wait_status("/ready", 200)
        pids = children(server)
        opened = [each for own in connected(server, connections, 1) for each in own]
        for connection in opened:
            begin(connection)
        os.kill(pids["engine"], signal.SIGKILL)
        for connection in opened:
            assert b'"code":"engine_dead"' in rest_of(connection)
        assert server.wait_exit() == exit_codes.FAILED
        assert server.log.splitlines()[-1] == KILLED
        assert not is_running(pids["api"])


def test_a_dead_engine_is_the_cause_even_if_another_process_ends_of_it_first(tmp_path: Path) -> None:
    with serving(tmp_path, *OPTIONS, environment={"SCRIPT": "hold", "SCRIPT_GATE": str(tmp_path / "never")}) as server:
        server.wait_status("/ready", 503)
        wait_until(lambda: "loading weights" in server.get("/ready").text, "the engine to load")
        pids = children(server)
        server.signal(signal.SIGSTOP)
        os.kill(pids["engine"], signal.SIGKILL)
        wait_until(lambda: not is_running(pids["api"]), "the other process to end")
        server.signal(signal.SIGCONT)
        assert server.wait_exit() == exit_codes.FAILED
        assert server.log.splitlines()[-1] == KILLED


def test_a_killed_first_process_ends_all(tmp_path: Path) -> None:
    with serving(tmp_path, *OPTIONS) as server:
        server.wait_status("/ready", 200)
        pids = children(server)
        os.kill(pids["api"], signal.SIGSTOP)  # it cannot see that the engine has ended
        server.signal(signal.SIGKILL)
        for pid in pids.values():
            wait_until(lambda pid=pid: not is_running(pid), "the other processes to end")  # type: ignore[misc]


def report(*request_ids: str, finished: bool = False, num_finished: int = 0) -> StepReport:
    reason = FinishReason.LENGTH if finished else None
    outputs = [TokenOutput(request_id, [7], reason) for request_id in request_ids]
    trace = StepTrace(decodes=[], prompts=[], queue=[], blocks=[])
    scheduler = SchedulerStats(num_running=1, num_waiting=1)
    return StepReport(outputs, StepStats(decode_tokens=1), scheduler, StepCoefficients(), trace, num_finished)


def test_each_client_gets_its_own_outputs_and_a_trace_if_it_watches() -> None:
    clients = Recipients(3)
    clients.open("a", 0)
    clients.open("b", 1)
    clients.open("c", 1)
    clients.watch(1, on=True)
    whole = report("b", "a", "c", "unknown", num_finished=5)
    parts = dict(clients.split(whole))
    own = {client: [output.request_id for output in part.outputs] for client, part in parts.items()}
    assert own == {0: ["a"], 1: ["b", "c"], 2: []}
    assert [client for client, part in parts.items() if part.trace is not None] == [1]
    assert all((part.scheduler, part.num_finished) == (whole.scheduler, 5) for part in parts.values())
    dict(clients.split(report("b", finished=True)))
    assert clients.leave(1) == ["c"], "b has ended"
    assert not clients.is_watched
    assert clients.present == [0, 2]
    assert dict(clients.split(report("c")))[0].outputs == []


def test_the_only_client_gets_every_report_as_it_is() -> None:
    clients = Recipients(1)
    clients.open("a", 0)
    whole = report("a", "b")
    assert [(client, part is whole) for client, part in clients.split(whole)] == [(0, True)]


def test_a_process_is_ready_once_all_serve() -> None:
    counts = SharedCounts(2)
    model = SimpleNamespace(engine=SimpleNamespace(alive=True, why_late=None))
    here, there = Lifecycle(counts.of(0)), Lifecycle(counts.of(1))
    here.begin_serving(cast(ServedModel, model))
    assert here.why_not_ready() == "1 of 2 API processes are ready"
    there.begin_serving(cast(ServedModel, model))
    assert here.why_not_ready() is there.why_not_ready() is None
    counts.clear(1)
    assert here.why_not_ready() is not None


def test_queue_places_of_all_processes_count() -> None:
    counts = SharedCounts(2)
    here, there = InFlight(2, counts.of(0)), InFlight(2, counts.of(1))
    here.reserve(["a", "b"])
    there.open("c", Ignoring())
    there.reserve(["d"])
    assert (here.num_queued, there.num_queued) == (2, 2)
    there.release(["d"])
    assert here.num_queued == 1
    here.record(report(num_finished=1))
    assert here.num_queued == 1, "two ran in the step, so short of memory the engine has two places"
    assert here.finished_per_second > 0, "the other process's request counts for Retry-After"
    counts.clear(1)
    assert here.num_queued == 0
