"""Ranks in processes of their own: they end together, whatever happens to one of them in a random step."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import support
from fastgen import exit_codes
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.build import load_on_ranks
from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.runner.failures import RankFailed
from fastgen.runner.ranks import processes
from fastgen.runner.ranks.processes import RankProcesses
from fastgen.runner.ranks.runners import RankedRunner
from fastgen.settings import ConfigError, EngineConfig
from support.driving import generate
from support.ranks import has_ended, wait_for_the_end
from support.tiny_models import prompt, saved

pytestmark = pytest.mark.slow  # each process imports torch

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [prompt(length, seed=length) for length in (40, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("ranks"))


def load(folder: Path, size: int, **settings: Any) -> Any:
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=16, kv_cache_memory=4 << 20, tensor_parallel=size, **settings
    )
    return load_on_ranks(ModelSource.open(str(folder)), config, lambda _stage, _fraction: None)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generate(load(folder, 1), PROMPTS, GREEDY, token_budget=16, at_once=2).tokens


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count as hung only a rank that is stopped for a minute: a busy machine may stop a healthy one for seconds."""
    monkeypatch.setattr("fastgen.link.silence.HUNG_SECONDS", 60.0)


@contextmanager
def ranks_of(folder: Path, size: int = 2) -> Iterator[tuple[RankedRunner, RankProcesses]]:
    """Yield the runner of a group that fails, and its processes, which have ended afterwards."""
    runner = load(folder, size)
    assert isinstance(runner, RankedRunner)
    ranks = runner._watch
    assert isinstance(ranks, RankProcesses)
    yield runner, ranks
    wait_for_the_end(ranks.pids)


def run_until_failure(
    runner: RankedRunner, expected: list[list[int]], at_step: Callable[[int], None]
) -> tuple[RankFailed, int]:
    """Run until the group fails; every token before that must be right. Return the failure, and its step."""
    engine = Engine(runner, EngineConfig(model="", token_budget=16, max_sequences=2))
    for number, tokens in enumerate(PROMPTS):
        engine.add(Request(id=str(number), prompt_token_ids=tokens, sampling=GREEDY))
    found: list[list[int]] = [[] for _ in PROMPTS]
    step = 0
    try:
        while engine.has_work:
            at_step(step)
            for output in engine.step().outputs:
                found[int(output.request_id)] += output.token_ids
            step += 1
    except RankFailed as failure:
        assert all(theirs[: len(ours)] == ours for ours, theirs in zip(found, expected, strict=True))
        return failure, step
    raise AssertionError("no rank failed")


def test_processes_compute_the_tokens_of_one_rank_and_end_with_their_runner(
    folder: Path, expected: list[list[int]]
) -> None:
    runner = load(folder, 2)
    pids = runner._watch.pids
    runner.start_prefault()
    assert generate(runner, PROMPTS, GREEDY, token_budget=16, at_once=2).tokens == expected
    assert not any(map(has_ended, pids))
    del runner
    gc.collect()
    wait_for_the_end(pids)


@pytest.mark.parametrize(
    ("size", "fault", "words", "code"),
    [
        (4, signal.SIGKILL, r"its process was killed by SIGKILL \(out of memory\?\)", exit_codes.FAILED),
        (2, signal.SIGSTOP, r"its process has not run for [34] s", exit_codes.HUNG),
    ],
)
def test_a_killed_or_stopped_rank_ends_all(
    folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    fault: signal.Signals,
    words: str,
    code: int,
) -> None:
    rng = random.Random(fault.name)
    at, rank = rng.randint(1, 35), rng.randint(1, size - 1)

    def strike(step: int) -> None:
        if step == at:
            os.kill(ranks.pids[rank - 1], fault)
            monkeypatch.setattr("fastgen.link.silence.HUNG_SECONDS", 3.0)

    with ranks_of(folder, size) as (runner, ranks):
        failure, _ = run_until_failure(runner, expected, strike)
    assert failure.failed.exit_code == code
    with pytest.raises(RankFailed, match=f"rank {rank}: {words}"):
        raise failure


@pytest.mark.parametrize(
    ("size", "fault", "words"),
    [(4, "error", "KeyError: 'a mistake'"), (2, "memory", r"out of memory: .*; lower --memory-percent")],
)
def test_an_error_of_a_rank_ends_all(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, size: int, fault: str, words: str
) -> None:
    rng = random.Random(fault)
    at, rank = rng.randint(1, 35), rng.randint(1, size - 1)
    monkeypatch.setenv("FAULT", f"{fault}:{at}:{rank}")
    monkeypatch.setenv("PYTHONPATH", str(Path(support.__file__ or "").parents[1]))
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-m", "support.faulty_rank"))
    with ranks_of(folder, size) as (runner, _):
        failure, step = run_until_failure(runner, expected, lambda _step: None)
        with pytest.raises(RankFailed, match=f"rank {rank}: {words}"):  # and so does every step from now on
            generate(runner, PROMPTS, GREEDY, token_budget=16, at_once=2)
    assert step == at
    assert failure.failed.exit_code == exit_codes.FAILED


@pytest.mark.parametrize("is_memory", [False, True], ids=["error", "memory"])
def test_a_fault_of_rank_0_ends_all_instead_of_rolling_the_step_back(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, is_memory: bool
) -> None:
    at = random.Random(is_memory).randint(1, 35)
    with ranks_of(folder) as (runner, _):
        forward = runner._model.forward

        def faulty(*given: Any) -> Any:
            hidden = forward(*given)
            raise MemoryError(f"no room for {hidden.nbytes} bytes") if is_memory else KeyError("a mistake")

        def strike(step: int) -> None:
            if step == at:
                monkeypatch.setattr(runner._model, "forward", faulty)

        failure, step = run_until_failure(runner, expected, strike)
        words = "rank 0: out of memory: no room for" if is_memory else "rank 0: KeyError: 'a mistake'"
        assert str(failure).startswith(words)
        assert step == at


def test_models_run_by_transformers_are_not_divided(folder: Path) -> None:
    source = ModelSource(folder, None, folder, None)
    config = EngineConfig(model=str(folder), tensor_parallel=2)
    with pytest.raises(ConfigError, match="--tensor-parallel 2: not available for models run by transformers"):
        load_on_ranks(source, config, lambda _stage, _fraction: None)
