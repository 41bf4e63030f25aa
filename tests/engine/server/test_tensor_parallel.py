"""A server whose model is divided among two processes."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.fuzzing_structures import Run
from engine.server.malformed import INVALID
from engine.server.serving import REAL, Serving, serving
from engine.server.test_hostile_grammars import BUSY, HOSTILE, ask
from fastgen import exit_codes
from support.ranks import wait_for_the_end
from support.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.slow  # two processes import torch


@contextmanager
def divided(model: Path, folder: Path, *more: str) -> Iterator[tuple[Serving, int]]:
    """Yield a server, and the process of its rank 1."""
    options = ("--tensor-parallel", "2", "--max-model-length", "2048", "--kv-cache-memory", "64MiB", *more)
    with serving(folder, *options, command=REAL, model=str(model)) as server:
        server.wait_status("/ready", 200, seconds=240)
        (rank,) = ranks_of(server.engine_pid())
        yield server, rank


def ranks_of(engine: int) -> list[int]:
    """Return the processes of ranks that an engine process has started."""
    found = [pid for path in Path(f"/proc/{engine}/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in found if b"fastgen.runner.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_ends_the_idle_server_with_one_line(small_model: Path, tmp_path: Path) -> None:
    with divided(small_model, tmp_path) as (server, rank):
        body = {"prompt": "The sun is", "max_tokens": 8, "temperature": 0}
        answers = [server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1]
        os.kill(rank, signal.SIGKILL)
        assert server.wait_exit() == exit_codes.FAILED
        assert "rank 1: its process was killed by SIGKILL (out of memory?)" in server.log.splitlines()[-1]
        assert "Traceback" not in server.log


def test_no_request_ends_the_ranks_or_changes_the_answers_of_others(small_model: Path, tmp_path: Path) -> None:
    """An error that one process would answer must not end the group."""
    asked = {
        "prompt": "The sun is",
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "echo": True,
    }
    with divided(small_model, tmp_path, "--dtype", "float32") as (server, rank):
        engine = server.engine_pid()
        expected = answer(server, asked)
        run = Run(server.url, server.get("/v1/models").json()["data"][0]["id"])
        with ThreadPoolExecutor(4) as clients:
            list(clients.map(run.send, range(60)))
            list(clients.map(lambda given: server.post(*given), INVALID.values()))
            leaving = [clients.submit(leave, server, number) for number in range(12)]
            beside = [answer(server, asked) for _ in range(3)]
            for left in leaving:
                left.result()
        assert not run.faults
        statuses = {case: ask(server, path, fields).status_code for case, (path, fields, _) in HOSTILE.items()}
        del statuses[BUSY]
        assert statuses == {case: status for case, (_, _, status) in HOSTILE.items() if case != BUSY}
        assert [*beside, answer(server, asked)] == [expected] * 4
        assert (server.engine_pid(), ranks_of(engine)) == (engine, [rank])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
            wait_until(lambda name=name: server.metric(f"fastgen_{name}") == 0, name)  # type: ignore[misc]


def answer(server: Serving, body: dict[str, Any]) -> Any:
    """Return the text of a completion."""
    return server.post("/v1/completions", body).json()["choices"][0]["text"]


def leave(server: Serving, number: int) -> None:
    """Ask for several streams, and close the connection after the first bytes."""
    rng = random.Random(number)
    body = {"prompt": [[7] * rng.randint(1, 900)] * 3, "n": 2, "max_tokens": 900, "stream": True, "seed": number}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANG_SECONDS) as response:
        assert response.status_code == 200
        next(response.iter_raw())


def test_the_ranks_end_with_a_killed_engine(small_model: Path, tmp_path: Path) -> None:
    with divided(small_model, tmp_path) as (server, rank):
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for_the_end([rank])
        assert server.wait_exit() == exit_codes.FAILED


def test_a_stopped_rank_0_ends_the_idle_server_and_the_other_ranks(small_model: Path, tmp_path: Path) -> None:
    with divided(small_model, tmp_path) as (server, rank):
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.wait_exit() == exit_codes.HUNG
        last = server.log.splitlines()[-1]
        assert re.search(r"rank 0: its process has not run for [34] s; look for stopped processes on the node$", last)
        wait_for_the_end([rank])


def test_the_ranks_end_with_a_killed_server(small_model: Path, tmp_path: Path) -> None:
    with divided(small_model, tmp_path) as (server, rank):
        engine = server.engine_pid()
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL
        wait_for_the_end([engine, rank])


def test_a_server_stops_although_a_rank_is_stopped(small_model: Path, tmp_path: Path) -> None:
    with divided(small_model, tmp_path) as (server, rank):
        os.kill(rank, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() in (0, exit_codes.HUNG)
        wait_for_the_end([rank])
