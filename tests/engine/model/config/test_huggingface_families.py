"""Native families and text parts of multimodal models against transformers in float32 with the same weights.

Logits are within 1e-4 and greedy tokens are equal with chunks of odd sizes, batching, preemption and prefix caching,
for both backends: the CPU kernels and torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fastgen.core.sampling_params import SamplingParams
from fastgen.model.config.huggingface_families import FAMILIES
from fastgen.model.config.multimodal import MULTIMODAL
from fastgen.model.native import load_on_torch
from fastgen.model.source import ModelSource
from fastgen.runner.loader import host_runner, with_cache
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig
from support.driving import LOADS, FewBlocks, assert_greedy, generate, logits_of, run_in_chunks
from support.tiny_models import PROMPT_LENGTH, TINY, TINY_MULTIMODAL, prompt, saved

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK_SIZE = 16
NUM_TOKENS = 12
MODELS = TINY | TINY_MULTIMODAL
NUM_TOKENS_AFTER_A_PREFIX = 3
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Pair:
    """One model with the same weights in this engine and in transformers."""

    runner: ModelRunner
    theirs: PreTrainedModel
    shortest: int

    def assert_greedy(self, start: list[int], output: list[int], num_tokens: int = NUM_TOKENS) -> None:
        assert_greedy(self.theirs, start, output, num_tokens)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module", params=[(name, way) for name in MODELS for way in LOADS], ids="-".join)
def pair(request: pytest.FixtureRequest, root: Path) -> Pair:
    name, way = request.param
    tiny = MODELS[name]
    folder = saved(name, root)
    config = EngineConfig(
        model=str(folder),
        kv_cache_memory=4 << 20,
        block_size=BLOCK_SIZE,
        max_model_length=tiny.max_model_length,
    )
    decoder = LOADS[way](
        source=ModelSource.open(str(folder)), max_model_length=tiny.max_model_length, progress=lambda _fraction: None
    )
    return Pair(with_cache(decoder, config, host_runner), tiny.build(), tiny.shortest)


def test_logits_equal_transformers_for_any_chunking_of_a_prompt(pair: Pair) -> None:
    tokens = prompt(PROMPT_LENGTH)
    expected = logits_of(pair.theirs, tokens)[-1]
    assert expected.std() > 0.1, "weights so small that nothing shows"
    single = [PROMPT_LENGTH - 24, *[1] * 24]  # for longer than any window
    for sizes in ([PROMPT_LENGTH], single, [7, 1, 23]):
        logits = run_in_chunks(pair.runner, tokens, [5, 0, 11, 2, 7, 3], sizes)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers_when_batched_and_preempted(pair: Pair) -> None:
    lengths = [max(length, pair.shortest) for length in (1, 40, 7, 61, PROMPT_LENGTH)]
    prompts = [prompt(length, seed=number) for number, length in enumerate(lengths)]
    # Five sequences of up to 95 tokens in 14 blocks of 16: some are preempted.
    few = FewBlocks(pair.runner, 14)
    outcome = generate(few, prompts, GREEDY, token_budget=23, at_once=5)
    assert outcome.preemptions > 0
    for start, output in zip(prompts, outcome.tokens, strict=True):
        pair.assert_greedy(start, output)


@pytest.mark.parametrize("pair", [(name, "kernels") for name in MODELS], ids="-".join, indirect=True)
def test_greedy_tokens_equal_transformers_after_a_cached_prefix(pair: Pair) -> None:
    shared = prompt(61)
    prompts = [shared, [*shared[:40], 9, 8, 7], shared, [*shared[:45], 5, 6]]
    sampling = replace(GREEDY, max_tokens=NUM_TOKENS_AFTER_A_PREFIX)
    outcome = generate(pair.runner, prompts, sampling, token_budget=64, at_once=1)
    # Recurrent states have a snapshot at the end of the first prompt, and then where the second one diverged.
    second = 0 if pair.runner.num_state_slots else 2
    assert outcome.cached == [blocks * BLOCK_SIZE for blocks in (0, second, 3, 2)]
    for start, output in zip(prompts, outcome.tokens, strict=True):
        pair.assert_greedy(start, output, NUM_TOKENS_AFTER_A_PREFIX)


@pytest.mark.parametrize("name", ["llama-biases", "phi3-partial", "gemma2", "gemma3", "qwen2-moe"])
def test_half_precision_stays_close_to_full_precision(root: Path, name: str) -> None:
    source = ModelSource.open(str(saved(name, root)))
    logits = {}
    for dtype in (torch.bfloat16, torch.float32):
        decoder = load_on_torch(
            source, torch.device("cpu"), dtype, max_model_length=None, progress=lambda _fraction: None
        )
        runner = with_cache(
            decoder, EngineConfig(model="", kv_cache_memory=4 << 20, block_size=BLOCK_SIZE), host_runner
        )
        assert runner.dtype == str(dtype).removeprefix("torch.")
        logits[dtype] = run_in_chunks(runner, prompt(30), [3, 1], [17, 1])
    assert logits[torch.bfloat16].dtype == torch.float32
    away = (logits[torch.bfloat16] - logits[torch.float32]).square().mean().sqrt()
    assert away < 0.1 * logits[torch.float32].std()


def test_every_native_family_is_tested() -> None:
    assert {tiny.config_class.model_type for tiny in TINY.values()} == set(FAMILIES)
    assert {tiny.config_class.model_type for tiny in TINY_MULTIMODAL.values()} == set(MULTIMODAL)
