"""The model runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model.source import ModelSource
from fastgen.runner.interface import Runner
from fastgen.runner.loader import load_runner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import ConfigError, EngineConfig
from support.demo_weights import demo_model
from support.driving import execute, generate, load, logits, sequence
from support.tiny_models import saved

pytestmark = pytest.mark.slow

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]


def test_the_runner_implements_the_protocol_and_describes_its_model(demo_runner: ModelRunner) -> None:
    runner: Runner = demo_runner
    assert (runner.block_size, runner.num_blocks) == (64, (256 << 20) // (2 * 30 * 3 * 64 * 64 * 4))
    assert runner.max_model_length == runner.num_blocks * 64
    assert (demo_runner.device, demo_runner.dtype, demo_runner.num_parameters) == ("cpu", "float32", 134_515_008)


def test_decodes_and_chunks_in_one_step_do_not_affect_each_other(demo_runner: ModelRunner) -> None:
    alone = [
        logits(demo_runner, StepPlan((Chunk(sequence(PROMPT * n, list(range(n))), 0, 12 * n),)))[0] for n in (1, 3, 6)
    ]
    first, second, third = (sequence(PROMPT * n, [7 * n, 7 * n + 1]) for n in (1, 3, 6))
    logits(demo_runner, StepPlan((Chunk(first, 0, 11), Chunk(second, 0, 20), Chunk(third, 0, 30))))
    first.num_computed_tokens, second.num_computed_tokens, third.num_computed_tokens = 11, 20, 30
    mixed = logits(demo_runner, StepPlan((Chunk(first, 11, 1), Chunk(second, 20, 16), Chunk(third, 30, 42))))
    torch.testing.assert_close(mixed, torch.stack(alone), atol=2e-4, rtol=0)


def test_a_step_without_sampled_rows_returns_no_tokens(demo_runner: ModelRunner) -> None:
    half = StepPlan((Chunk(sequence(PROMPT, [0]), 0, 5),))
    assert execute(demo_runner, half).token_ids == []
    assert logits(demo_runner, half).shape == (0, 49152)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(demo_runner: ModelRunner) -> None:
    seeded = SamplingParams(temperature=1, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
    (alone,) = generate(demo_runner, [PROMPT], seeded, token_budget=64, at_once=1).tokens
    together = generate(demo_runner, [PROMPT[:5], PROMPT, PROMPT * 4], seeded, token_budget=16, at_once=3).tokens
    assert together[1] == alone


def test_loading_progress_goes_from_zero_to_one(demo_source: ModelSource) -> None:
    heard: list[tuple[str, float]] = []
    config = EngineConfig(model=str(demo_model()), kv_cache_memory=32 << 20)
    load_runner(demo_source, config, lambda stage, fraction: heard.append((stage, fraction)))
    loading = [fraction for stage, fraction in heard if stage == "loading weights"]
    assert loading == sorted(loading)
    assert (loading[0], loading[-1]) == (0.0, 1.0)


def test_a_max_model_length_larger_than_the_cache_is_rejected_while_loading(demo_source: ModelSource) -> None:
    config = EngineConfig(model=str(demo_model()), dtype="float32", kv_cache_memory=32 << 20, max_model_length=4096)
    with pytest.raises(ConfigError, match="needs 64 blocks of 64 tokens, the KV cache has 11"):
        load_runner(demo_source, config, lambda _stage, _fraction: None)


def test_a_block_size_other_than_the_default_gives_the_same_tokens(demo_runner: ModelRunner) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    small = load(demo_model(), kv_cache_memory=32 << 20, block_size=16)
    runs = [
        generate(runner, [PROMPT * 3], greedy, token_budget=32, at_once=1).tokens for runner in (demo_runner, small)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_step_allocates_no_more_memory_for_a_larger_cache(name: str, tmp_path: Path) -> None:
    """Guards against copying a whole layer's cache in each step, which small test caches hide."""
    runner = load(saved(name, tmp_path), kv_cache_memory=2 << 30)
    a_layer = (2 << 30) // (2 * len(runner.architecture.layers))
    prompt = list(range(3, 83))
    first = sequence(prompt, [0, 9, 2, 7, 4, 11])
    logits(runner, StepPlan((Chunk(first, 0, 40),)))  # allocates the buffers of the first step
    before = reset_peak_memory()
    first.num_computed_tokens = 40
    logits(runner, StepPlan((Chunk(first, 40, 1), Chunk(sequence(prompt, [1, 3, 5, 6, 8, 10]), 0, 70))))
    assert peak_memory() - before < a_layer / 8


def reset_peak_memory() -> int:
    """Reset the peak (proc_pid_clear_refs(5)) and return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_has_as_many_threads_as_openmp(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    before = torch.get_num_threads()
    try:
        load(saved("llama", tmp_path), kv_cache_memory=4 << 20)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
