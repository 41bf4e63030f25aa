"""A model on several ranks gives the results of one, whatever a request asks for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runner.test_equivalence import BLOCK_SIZE, Clocked, engine_of
from engine.runner.test_pooling import ANSWERS, LAST, MEAN, pooled, run
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.memory import AvailableMemory
from fastgen.link.messages import TokenOutput
from fastgen.model.source import ModelSource
from fastgen.runner import loader
from fastgen.runner.failures import GroupBroken
from fastgen.runner.ranks import gloo
from fastgen.runner.ranks.runners import RankedRunner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig
from support.checking import check_step
from support.driving import sequence, step_input
from support.gguf_writing import write_gguf
from support.ranks import ranked
from support.tiny_models import VOCABULARY, Tiny, prompt, saved
from support.workloads import Outcome, Workload, play, random_workload

pytestmark = pytest.mark.slow  # together over ten seconds

SETTINGS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "kv_cache_memory": 4 << 20,
    "swap_space": 4 << 20,
    "max_model_length": 160,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [prompt(length, seed=length) for length in (1, 40, 7, 61)]


def one_rank(folder: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(model=str(folder), **{**SETTINGS, **settings})
    runner = loader.load_runner(ModelSource.open(str(folder)), config, lambda _stage, _fraction: None)
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen2", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> ModelRunner:
    return one_rank(folder, dtype="float32")


@pytest.fixture(scope="module")
def together(folder: Path) -> Iterator[RankedRunner]:
    with ranked(folder, 2, dtype="float32", **SETTINGS) as (runner, _):
        yield runner


def outcome_of(runner: ModelRunner, workload: Workload) -> Outcome:
    clocked = Clocked(runner, workload.num_blocks, min(workload.num_host_blocks, runner.num_host_blocks))
    return play(
        engine_of(clocked, workload),
        workload.arrivals,
        lambda engine, step: check_step(engine, step, workload.token_budget),
        vocabulary=VOCABULARY,
    )


def test_swapping_preemption_and_cached_prefixes_change_no_token(alone: ModelRunner, together: RankedRunner) -> None:
    assert (together.num_blocks, together.num_host_blocks) == (alone.num_blocks, alone.num_host_blocks)
    assert together.num_parameters == alone.num_parameters
    swapped = cached = preempted = 0
    for seed in range(8):
        workload = random_workload(random.Random(seed), block_size=BLOCK_SIZE, longest_prompt=90, most=6)
        expected, found = outcome_of(alone, workload), outcome_of(together, workload)
        assert (found.outputs, found.finished) == (expected.outputs, expected.finished), f"workload {seed}"
        for request, logprobs in expected.prompt_logprobs.items():
            assert found.prompt_logprobs[request] == pytest.approx(logprobs, abs=1e-4)
        swapped, preempted = swapped + found.swapped_out, preempted + found.preemptions
        cached += sum(found.cached_tokens.values())
    assert min(swapped, preempted, cached) > 5, (swapped, preempted, cached)


def test_sampling_parameters_and_logprobs_have_the_same_effect(alone: ModelRunner, together: RankedRunner) -> None:
    drawn = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=5, max_tokens=10, ignore_eos=True)
    samplings = [
        drawn,
        replace(drawn, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=6),
        replace(GREEDY, logit_bias=((9, 4.0), (11, -100.0)), bad_words=((17,), (4, 5)), logprobs=3),
        replace(GREEDY, logprobs=2, prompt_logprobs=2),
    ]
    asked = [
        Request(id=str(number), prompt_token_ids=tokens, sampling=sampling)
        for number, (tokens, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    expected, found = run(alone, asked)[0], run(together, asked)[0]
    for request in asked:
        assert tokens_of(found[request.id]) == tokens_of(expected[request.id])
        assert logprobs_of(found[request.id]) == pytest.approx(logprobs_of(expected[request.id]), abs=1e-4)
    assert logprobs_of(found["3"])


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: list[TokenOutput]) -> list[float]:
    rows = [row for output in outputs for row in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))]
    return [value for row in rows for value in (row.logprob, *(logprob for _, logprob in row.top))]


def test_pooled_prompts_give_the_same_vectors(alone: ModelRunner, together: RankedRunner) -> None:
    asked = [pooled(number, 37, pooling) for number, pooling in enumerate((LAST, MEAN, ANSWERS))]
    expected, found = run(alone, asked)[0], run(together, asked)[0]
    for request in asked:
        (theirs,), (ours,) = (outputs[request.id] for outputs in (expected, found))
        assert ours.pooled is not None
        assert theirs.pooled is not None
        np.testing.assert_allclose(np.frombuffer(ours.pooled, "<f4"), np.frombuffer(theirs.pooled, "<f4"), atol=1e-4)


def test_rank_0_applies_the_masks_of_grammars(together: RankedRunner) -> None:
    plan = StepPlan((Chunk(sequence(PROMPTS[2], [0]), 0, 7),))
    step = replace(step_input(plan, BLOCK_SIZE), masked=np.zeros(1, np.int32))
    only = np.zeros(-(-VOCABULARY // 32), np.uint32)
    only[3] = 1 << 7
    ticket = together.launch(step)
    ticket.sample([only])
    assert ticket.result().token_ids == [3 * 32 + 7]


def mean_difference(path: Path, size: int, **settings: Any) -> float:
    """Return how far the logprobs of a prompt on `size` ranks are from those on one: tokens differ by rounding."""
    sampling = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    asked = [Request(id="0", prompt_token_ids=PROMPTS[3], sampling=sampling)]
    expected = logprobs_of(run(one_rank(path, **settings), asked)[0]["0"])
    with ranked(path, size, **settings, **SETTINGS) as (runner, _):
        found = logprobs_of(run(runner, asked)[0]["0"])
    assert len(found) == len(PROMPTS[3]) - 1
    return float(np.abs(np.array(found) - expected).mean())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gemma2", "qwen2-moe"])
def test_torch_operations_compute_on_ranks(tmp_path: Path, name: str, size: int) -> None:
    """In float16, which the CPU kernels lack."""
    assert mean_difference(saved(name, tmp_path), size, dtype="float16") < 0.01


def test_bfloat16_stays_close_to_one_rank(tmp_path: Path) -> None:
    assert mean_difference(saved("llama", tmp_path), 2, dtype="bfloat16") < 0.05


@pytest.mark.parametrize("kind", ["safetensors", "Q8_0", "Q4_0"])
def test_int8_stays_close_to_one_rank(tmp_path: Path, kind: str) -> None:
    """Both have the same blocks, but products may quantise activations, which are rounded differently."""
    wide = Tiny("Llama", {"intermediate_size": 160, "hidden_size": 128, "head_dim": 32})
    if kind == "safetensors":
        wide.build().save_pretrained(tmp_path)
    path = tmp_path if kind == "safetensors" else write_gguf(wide.build(), tmp_path / "tiny.gguf", kind)
    assert mean_difference(path, 2, dtype="float32", quantization="int8") < 0.01


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_rank_with_half_the_memory_sets_the_blocks_of_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of layers with a window (Gemma 3)."""

    def memory() -> AvailableMemory:
        is_main = threading.current_thread() is threading.main_thread()
        return AvailableMemory((1 << 30) // (1 if is_main else 2), limited=True)

    def sizes(runner: Any) -> tuple[int, int]:
        return runner.num_blocks, runner.window_group.num_blocks if name == "gemma3" else 0

    monkeypatch.setattr(loader, "available_memory", memory)
    # Few positions would limit the blocks, not the memory.
    folder, settings = saved(name, tmp_path), {"block_size": BLOCK_SIZE, "dtype": "float32", "memory_percent": 1}
    with ranked(folder, 2, **settings) as (runner, followers):
        found = {sizes(each) for each in (runner, *followers)}
    monkeypatch.setattr(loader, "available_memory", lambda: AvailableMemory(1 << 29, limited=True))
    with ranked(folder, 2, **settings) as (runner, _):
        least = sizes(runner)
    assert found == {least}
    monkeypatch.setattr(loader, "available_memory", lambda: AvailableMemory(1 << 30, limited=True))
    with ranked(folder, 2, **settings) as (runner, _):
        assert all(more > fewer for more, fewer in zip(sizes(runner), least, strict=True) if fewer)


def test_a_rank_that_does_not_come_breaks_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_TIMEOUT", timedelta(milliseconds=10))
    with pytest.raises(GroupBroken):
        gloo.GlooGroup(tmp_path / "store", 0, 2)
