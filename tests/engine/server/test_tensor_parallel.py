"""A server whose model is divided among two processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.server.serving import REAL, Serving, serving
from fastgen import exit_codes
from support.ranks import wait_for_the_end

pytestmark = pytest.mark.slow  # two processes import torch


@contextmanager
def divided(model: Path, folder: Path) -> Iterator[tuple[Serving, int]]:
    """Yield a server, and the process of its rank 1."""
    options = ("--tensor-parallel", "2", "--max-model-length", "2048", "--kv-cache-memory", "64MiB")
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
