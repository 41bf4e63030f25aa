"""Layers with a window in blocks of their own: tokens equal transformers' in contexts of many windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastgen.core.blocks.window_pool import WindowGroup, most_held
from fastgen.core.sampling_params import SamplingParams
from fastgen.model.source import ModelSource
from fastgen.runner.loader import host_runner, with_cache
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig
from support.driving import LOADS, FewBlocks, assert_greedy, generate
from support.tiny_models import TINY, prompt, saved

pytestmark = pytest.mark.slow  # over ten seconds

BLOCK_SIZE = 16
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WINDOW = 8
LEAST = most_held(WINDOW, BLOCK_SIZE)


def load(name: str, way: str, root: Path, **settings: int) -> ModelRunner:
    folder = saved(name, root)
    decoder = LOADS[way](source=ModelSource.open(str(folder)), max_model_length=None, progress=lambda _fraction: None)
    config = EngineConfig(model=str(folder), kv_cache_memory=4 << 20, block_size=BLOCK_SIZE, **settings)
    return with_cache(decoder, config, host_runner)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "kernels") for name in ("gemma2", "gemma3", "gpt-oss", "gemma4-shared")), ("gemma4-shared", "torch")],
)
def test_tokens_equal_transformers_over_many_windows(name: str, way: str, root: Path) -> None:
    runner, theirs = load(name, way, root), TINY[name].build()
    assert runner.window_group is not None
    assert runner.window_group.window == WINDOW
    common = prompt(90)
    prompts = [prompt(200), common, [*common[:80], *prompt(60, seed=1)], prompt(17), [*common, 5, 6, 7], prompt(200)]
    for budget, num_blocks, num_window_blocks in ((23, 60, 12), (64, 26, 100), (300, 60, LEAST)):
        group = WindowGroup(WINDOW, min(num_window_blocks, runner.window_group.num_blocks))
        few = replace(FewBlocks(runner, num_blocks), window_group=group)
        for at_once in (1, 4):
            outcome = generate(few, prompts, GREEDY, token_budget=budget, at_once=at_once)
            for start, output in zip(prompts, outcome.tokens, strict=True):
                assert_greedy(theirs, start, output, NUM_TOKENS)
            assert at_once == 1 or num_window_blocks == 12 or outcome.preemptions > 0
            assert sum(outcome.cached) > 0 or num_window_blocks == LEAST


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_models_without_two_kinds_of_layers_have_one_kind_of_blocks(name: str, root: Path) -> None:
    runner = load(name, "kernels", root)
    assert runner.window_group is None
    assert runner._cache.windowed is None


def test_with_swap_space_all_layers_keep_all_tokens(root: Path) -> None:
    assert load("gemma3", "kernels", root, swap_space=1 << 20).window_group is None
