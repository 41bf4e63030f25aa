"""Failures while the server serves, with real processes: a hang, an error of the GPU, and no memory for a request."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.server.scripted_engine import FAULT
from engine.server.serving import Serving, serving
from support.waiting import HANG_SECONDS, wait_until

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
BODY = {"prompt": "go on", "max_tokens": 5, "ignore_eos": True}
FAULTY = {**BODY, "prompt": [9, FAULT, 9]}


class Posting(threading.Thread):
    """A request in the background."""

    def __init__(self, server: Serving, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body
        self.start()

    def run(self) -> None:
        self._response = self._server.post("/v1/completions", self._body)

    def response(self) -> httpx.Response:
        self.join(HANG_SECONDS)
        return self._response


# The engine is late after 10 s and hangs after 20 s: the first steps may take ten times this limit. A test has time to
# look between them, although it, too, may be stopped for seconds.
STEP_LIMIT = ("--step-timeout-seconds", "2")


def test_requests_go_elsewhere_while_a_step_takes_too_long(tmp_path: Path) -> None:
    with serving(tmp_path, *STEP_LIMIT) as server:
        server.wait_status("/ready", 200)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        pending = Posting(server, BODY)
        wait_until(lambda: server.status("/ready") == 503, "/ready 503")
        assert "the engine may hang: it has had work for" in server.get("/ready").json()["status"]
        rejected = server.post("/v1/completions", BODY)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "engine_late")
        assert rejected.headers["Retry-After"]
        assert server.status("/health") == 200, "half of the time is left"
        os.kill(server.engine_pid(), signal.SIGCONT)
        assert pending.response().status_code == 200
        assert server.status("/ready") == 200


def test_a_stopped_engine_is_killed_and_the_server_exits_with_the_cause(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path, *STEP_LIMIT, environment={"SCRIPT_STOP_GATE": str(gate)}) as server:
        server.wait_status("/ready", 200)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        pending = Posting(server, BODY)
        wait_until(lambda: server.status("/health") == 503, "/health 503", 40)
        cause = server.get("/health").json()["status"]
        assert re.search(r"the engine hangs: it has had work for \d+ s without finishing a step", cause)
        gate.touch()
        assert server.wait_exit() == 4
        response = pending.response()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        assert "the engine hangs" in response.json()["error"]["message"]
        last = server.log.splitlines()[-1]
        assert last.startswith("fastgen: error: the engine hangs: ")
        assert "Xid" in last
        assert not Path(f"/proc/{engine}").exists(), "the hung process was killed"


def test_an_error_of_the_gpu_ends_all_requests_and_the_server_with_one_line(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    environment = {"SCRIPT_ERROR": ILLEGAL, "SCRIPT_STEP_SECONDS": "0.02", "SCRIPT_STOP_GATE": str(gate)}
    with serving(tmp_path, environment=environment) as server:
        server.wait_status("/ready", 200)
        stream = Posting(server, {**BODY, "max_tokens": 2000, "stream": True})
        wait_until(lambda: server.metric("fastgen_num_requests_running") == 1, "the stream to run")
        error = server.post("/v1/completions", FAULTY).json()["error"]
        assert error["code"] == "engine_dead"
        assert "the GPU failed: CUDA error: an illegal memory access was encountered" in error["message"]
        assert "the GPU failed" in stream.response().text.splitlines()[-4]
        wait_until(lambda: server.status("/health") == 503, "/health 503")
        assert "the GPU failed" in server.get("/health").json()["status"]
        gate.touch()
        assert server.wait_exit() == 3
        assert server.log.splitlines()[-1] == (
            "fastgen: error: the GPU failed: CUDA error: an illegal memory access was encountered; look for Xid "
            "messages in the node's dmesg, and replace the GPU if they return"
        )
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    environment = {"SCRIPT_ERROR": NO_MEMORY, "SCRIPT_STEP_SECONDS": "0.02"}
    folder = tmp_path_factory.mktemp("memory")
    with serving(folder, environment={**environment, "SCRIPT_END": str(folder / "end")}) as server:
        server.wait_status("/ready", 200)
        yield server


def test_a_request_without_memory_gets_503_and_the_others_go_on(short_of_memory: Serving) -> None:
    server = short_of_memory
    end = server.log_path.with_name("end")

    def decoded() -> float:
        return server.metric("fastgen_scheduled_tokens_total", phase="decode")

    other = Posting(server, {"prompt": "go on", "max_tokens": 2000})
    wait_until(lambda: server.metric("fastgen_num_requests_running") == 1, "the other request to run")
    faulty = Posting(server, FAULTY)
    wait_until(lambda: server.metric("fastgen_steps_out_of_memory_total") > 0, "the step of both to fail")
    before = decoded()
    wait_until(lambda: decoded() > before + 10, "the other one to go on")
    end.touch()
    assert other.response().json()["choices"][0]["finish_reason"] == "stop"
    response = faulty.response()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "out_of_memory")
    assert "--memory-percent" in response.json()["error"]["message"]
    assert server.metric("fastgen_steps_out_of_memory_total") >= 2
    assert server.metric("fastgen_request_success_total", finish_reason="out_of_memory") == 1
    wait_until(lambda: server.metric("fastgen_num_requests_running") == 0, "everything to be freed")
    assert server.status("/ready") == 200
    assert "ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in server.log


def test_a_stream_without_memory_ends_with_the_error(short_of_memory: Serving) -> None:
    response = short_of_memory.post("/v1/completions", {**FAULTY, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert json.loads(events[-2])["error"]["code"] == "out_of_memory"
    assert events[-1] == "[DONE]"
