"""Startup, faults, disconnects and drain, with the scripted engine in its real process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from engine.server.serving import Serving, serving
from support.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.slow  # together over ten seconds

SLOW = {"SCRIPT_STEP_SECONDS": "0.02"}
STREAMING_CLIENT = Path(__file__).parents[2] / "support" / "streaming_client.py"
# At least 40 s: the test ends these requests.
ENDLESS = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True}
# As long, unless the test ends it by the file in SCRIPT_END.
UNTIL_END = {"prompt": "go on", "max_tokens": 2000}


def running(server: Serving) -> float:
    return server.metric("fastgen_num_requests_running")


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def send_raw(server: Serving, body: dict[str, object]) -> socket.socket:
    """Send a completion request and return its socket."""
    content = json.dumps(body).encode()
    fields = f"Host: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    return connection


class Streaming(threading.Thread):
    """A client thread that reads a stream to its end."""

    def __init__(self, server: Serving, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.began = threading.Event()
        self._server, self._body = server, body
        self.start()
        assert self.began.wait(HANG_SECONDS), "the stream did not begin"

    def run(self) -> None:
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json={**self._body, "stream": True}, timeout=HANG_SECONDS) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.began.set()

    def finish_reasons(self) -> list[str | None]:
        """Wait for the end of the stream and return the finish reason of each chunk."""
        self.join(HANG_SECONDS)
        assert not self.is_alive(), "the stream did not end"
        return [json.loads(event)["choices"][0]["finish_reason"] for event in self.events if event != "[DONE]"]


def test_the_server_responds_while_the_engine_loads(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, environment={"SCRIPT": "hold", "SCRIPT_GATE": str(gate)}) as server:
        server.wait_status("/health", 200)
        wait_until(lambda: server.get("/ready").json() == {"status": "loading weights 40 %"}, "the engine's progress")
        assert server.status("/ready") == 503
        response = server.post("/v1/completions", ENDLESS)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert int(response.headers["Retry-After"]) > 0
        assert server.status("/metrics") == 200
        gate.touch()
        server.wait_status("/ready", 200)
        assert server.status("/health") == 200


def test_sigterm_while_loading_ends_both_processes(tmp_path: Path) -> None:
    with serving(tmp_path, environment={"SCRIPT": "hold", "SCRIPT_GATE": str(tmp_path / "never")}) as server:
        server.wait_status("/health", 200)
        wait_until(lambda: "40 %" in server.get("/ready").text, "the engine's progress")
        engine = server.engine_pid()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert not is_alive(engine)


@pytest.mark.parametrize(
    ("script", "exit_code", "last_line"),
    [
        ("refuse", 2, "fastgen: error: --max-model-length 99999: the KV cache holds 4096 tokens; lower it"),
        ("crash", 1, "fastgen: error: the engine process was killed by SIGKILL (out of memory?)"),
    ],
)
def test_a_failed_engine_start_ends_the_server_with_one_log_line(
    tmp_path: Path, script: str, exit_code: int, last_line: str
) -> None:
    with serving(tmp_path, environment={"SCRIPT": script}) as server:
        assert server.wait_exit() == exit_code
        assert server.log.splitlines()[-1] == last_line
        assert "Traceback" not in server.log


def test_a_killed_engine_ends_streams_health_and_server(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, environment={**SLOW, "SCRIPT_STOP_GATE": str(gate)}) as server:
        server.wait_status("/ready", 200)
        stream = Streaming(server, ENDLESS)
        full: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: full.append(server.post("/v1/completions", ENDLESS)))
        waiting.start()
        name = server.client().models.list().data[0].id
        openais = server.client().completions.create(model=name, prompt="go on", max_tokens=2000, stream=True)
        wait_until(lambda: running(server) == 3, "the requests to run")
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: server.status("/health") == 503, "/health 503")
        assert "killed by SIGKILL" in server.get("/health").json()["status"]
        response = server.post("/v1/completions", ENDLESS)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        with pytest.raises(openai.APIError, match="the engine died during this request"):
            list(openais)
        gate.touch()
        assert server.wait_exit() == 1
        stream.join(HANG_SECONDS)
        waiting.join(HANG_SECONDS)
        assert json.loads(stream.events[-2])["error"]["code"] == "engine_dead"
        assert stream.events[-1] == "[DONE]"
        assert (full[0].status_code, full[0].json()["error"]["type"]) == (500, "server_error")
        assert (
            server.log.splitlines()[-1] == "fastgen: error: the engine process was killed by SIGKILL (out of memory?)"
        )
        assert "Traceback" not in server.log
        # Only the request that came when the engine was dead was rejected. The others had been admitted.
        assert [line.count("code=engine_dead") for line in server.log.splitlines() if " rejected " in line] == [1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_sequence(slow: Serving, stream: bool) -> None:
    aborted = slow.metric("fastgen_request_success_total", finish_reason="abort")
    lines = slow.log.count("status=499 finish=none")
    connection = send_raw(slow, {**ENDLESS, "stream": stream})
    wait_until(lambda: running(slow) == 1, "the request to run")
    if stream:
        assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    wait_until(lambda: running(slow) == 0, "the sequence to be freed")
    assert slow.metric("fastgen_kv_cache_tokens") == 0
    wait_until(lambda: slow.log.count("status=499 finish=none") == lines + 1, "the request's line in the log")
    assert slow.metric("fastgen_request_success_total", finish_reason="abort") == aborted + 1
    assert slow.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert "Traceback" not in slow.log


def test_a_disconnect_frees_the_sequence_within_one_step(tmp_path: Path) -> None:
    """At most the step running at the disconnect is counted after it; that step ends when the test says so."""
    pause = tmp_path / "pause"
    with serving(tmp_path, environment={**SLOW, "SCRIPT_PAUSE": str(pause)}) as server:
        server.wait_status("/ready", 200)
        body = {**ENDLESS, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG_SECONDS) as stream:
            lines = stream.iter_lines()  # httpx closes the connection when it is collected
            assert next(lines).startswith("data:")
            assert running(server) == 1
            pause.touch()
            wait_until(lambda: Path(f"{pause}.waits").exists(), "a step to wait")
        wait_until(lambda: "status=499 finish=none" in server.log, "the disconnect to be seen")
        steps = server.metric("fastgen_step_seconds_count")
        pause.unlink()
        wait_until(lambda: running(server) == 0, "the sequence to be freed")
        assert server.metric("fastgen_step_seconds_count") <= steps + 1


def test_a_disconnect_frees_the_sequences_of_all_prompts(slow: Serving) -> None:
    aborted = slow.metric("fastgen_request_success_total", finish_reason="abort")
    connection = send_raw(slow, {**ENDLESS, "prompt": ["a", "b", "c"]})
    wait_until(lambda: running(slow) == 3, "the prompts to run")
    connection.close()
    wait_until(lambda: running(slow) == 0, "the sequences to be freed")
    assert slow.metric("fastgen_kv_cache_tokens") == 0
    assert slow.metric("fastgen_request_success_total", finish_reason="abort") == aborted + 3


def test_a_stop_string_frees_its_sequence(slow: Serving) -> None:
    done = slow.post("/v1/completions", {**ENDLESS, "stop": "on"}).json()
    choice = done["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("go ", "stop", "on")
    wait_until(lambda: running(slow) == 0, "the sequence to be freed")


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with serving(tmp_path, environment={**SLOW, "SCRIPT_END": str(end)}) as server:
        server.wait_status("/ready", 200)
        stream = Streaming(server, UNTIL_END)
        engine = server.engine_pid()
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.status("/ready") == 503, "/ready 503")
        assert server.get("/ready").json() == {"status": "draining"}
        assert server.status("/health") == 200
        response = server.post("/v1/completions", ENDLESS)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert response.headers["X-FastGen-Draining"] == "1"
        assert int(response.headers["Retry-After"]) > 0
        end.touch()
        assert stream.finish_reasons()[-1] == "stop"
        assert server.wait_exit() == 0
        assert not is_alive(engine)


def test_a_drain_serves_the_next_request_of_each_kept_connection_and_then_closes_it(tmp_path: Path) -> None:
    brief, end = {"prompt": "go on", "max_tokens": 2}, tmp_path / "end"
    environment = {**SLOW, "SCRIPT_END": str(end), "SCRIPT_IDLE_SECONDS": "60"}
    with (
        serving(tmp_path, environment=environment) as server,
        httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as kept,
    ):
        server.wait_status("/ready", 200)
        assert "connection" not in kept.post("/v1/completions", json=brief).headers
        stream, unstarted = Streaming(server, UNTIL_END), send_raw(server, UNTIL_END)
        wait_until(lambda: running(server) == 2, "the requests to run")
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.status("/ready") == 503, "/ready 503")
        served, rejected = kept.post("/v1/completions", json=brief), kept.post("/v1/completions", json=brief)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        assert (rejected.status_code, rejected.headers["connection"]) == (503, "close")
        end.touch()
        assert b"\r\nconnection: close\r\n" in unstarted.recv(65536)
        assert stream.finish_reasons()[-1] == "stop"
        assert server.wait_exit() == 0


def test_a_drain_closes_idle_connections_after_a_moment(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with serving(tmp_path, environment={**SLOW, "SCRIPT_END": str(end)}) as server:
        server.wait_status("/ready", 200)
        stream = Streaming(server, UNTIL_END)
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += idle.recv(65536)
            server.signal(signal.SIGTERM)
            assert idle.recv(65536) == b"", "the end of the connection"
        assert stream.is_alive(), "requests still run"
        end.touch()
        assert stream.finish_reasons()[-1] == "stop"
        assert server.wait_exit() == 0


def test_sigterm_loses_no_stream_of_the_cluster_tests_client(tmp_path: Path) -> None:
    environment = {**SLOW, "SCRIPT_IDLE_SECONDS": "60"}
    with serving(tmp_path, "--served-model-name", "smollm2", environment=environment) as server:
        server.wait_status("/ready", 200)
        command = [sys.executable, "-c", STREAMING_CLIENT.read_text(), "127.0.0.1", str(server.port), "smollm2"]
        # Streams of ten seconds: this test, too, may be stopped for seconds.
        client = subprocess.Popen([*command, "3", "10"], stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout is not None
            brief = [client.stdout.readline().split() for _ in range(3)]
            wait_until(lambda: running(server) == 3, "three streams")
            server.signal(signal.SIGTERM)
            assert server.wait_exit() == 0
            lines = (line.split() for line in client.stdout)
            ended = []
            while sum(line[0] == "ok" for line in ended) < 6 and len(ended) < 600:
                ended.append(next(lines))
            then = [next(lines) for _ in range(3)]
        finally:
            client.kill()
            client.wait()
        assert "draining: 3 open requests" in server.log
        # A busy machine sends several tokens at once.
        assert all(line[0] == "ok" and 0 < int(line[2]) <= 8 for line in brief), brief
        # The running streams, then one more on each kept connection.
        served = [line for line in ended if line[0] == "ok"]
        assert len(served) == 6, ended
        assert all(int(line[2]) > 8 for line in served), served
        # Then the client needs new connections, and reports failures: the first while another stream still runs.
        assert all("draining" in line for line in ended if line not in served), ended
        assert [line[0] for line in then] == ["failed"] * 3


def test_requests_still_running_after_the_drain_are_aborted(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-seconds", "1", environment=SLOW) as server:
        server.wait_status("/ready", 200)
        stream = Streaming(server, ENDLESS)
        server.signal(signal.SIGTERM)
        assert stream.finish_reasons()[-1] == "abort"
        assert server.wait_exit() == 0


def test_a_second_signal_ends_the_drain_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-seconds", "3600", environment=SLOW) as server:
        server.wait_status("/ready", 200)
        stream = Streaming(server, ENDLESS)
        server.signal(signal.SIGINT)
        wait_until(lambda: server.status("/ready") == 503, "/ready 503")
        server.signal(signal.SIGINT)
        assert stream.finish_reasons()[-1] == "abort"
        assert server.wait_exit() == 0


def test_an_idle_server_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-seconds", "3600") as server:
        server.wait_status("/ready", 200)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        print(f"stopped after {time.monotonic() - began:.2f} s")


def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_status("/ready", 200)
        engine = server.engine_pid()
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL
        wait_until(lambda: not is_alive(engine), "the engine to end with its server")


def test_each_request_is_logged_once(scripted: Serving) -> None:
    done = scripted.post("/v1/completions", {"prompt": "a b c", "max_tokens": 4}).json()
    (line,) = (line for line in scripted.log.splitlines() if done["id"] in line)
    assert "status=200 finish=length prompt_tokens=3 completion_tokens=4 first_token=0." in line


def test_each_rejection_is_logged_once(scripted: Serving) -> None:
    before = scripted.log.count("rejected status=400 code=invalid_value param=best_of")
    scripted.post("/v1/completions", {"prompt": "a", "best_of": 0})
    assert scripted.log.count("rejected status=400 code=invalid_value param=best_of") == before + 1


def test_startup_logs_the_model_and_the_limits(scripted: Serving) -> None:
    assert "model smollm2: scripted, 135 M parameters, float32 on cpu" in scripted.log
    assert "KV cache: 64 blocks of 64 tokens; token budget 256, at most 256 sequences" in scripted.log
    assert f"ready on http://127.0.0.1:{scripted.port} after " in scripted.log
