"""Every native family on 2 and 4 ranks: greedy tokens equal those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.core.sampling_params import SamplingParams
from support.driving import FewBlocks, Outcome, generate, load
from support.ranks import ranked
from support.tiny_models import PROMPT_LENGTH, TINY, prompt, saved

pytestmark = pytest.mark.slow  # together over ten seconds

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 16, "kv_cache_memory": 4 << 20}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def outcome(runner: Any, shortest: int = 1) -> Outcome:
    """Run four sequences in chunks and together, and one whose prompt is in the cache, which cannot hold them all."""
    lengths = [max(length, shortest) for length in (1, 40, 61, PROMPT_LENGTH)]
    prompts = [prompt(length, seed=number) for number, length in enumerate(lengths)]
    scarce = FewBlocks(runner, 10, runner.num_host_blocks)
    preemption = "swap" if runner.num_host_blocks else "recompute"
    settings = {"preemption": preemption, "swap_space": runner.num_host_blocks}
    return generate(scarce, [*prompts, prompts[2]], GREEDY, token_budget=48, at_once=4, **settings)


@pytest.mark.parametrize("name", TINY)
def test_tokens_of_two_and_four_ranks_equal_those_of_one(root: Path, name: str) -> None:
    folder, tiny = saved(name, root), TINY[name]
    # Preempted sequences are swapped, or recomputed where layers with a window have blocks of their own. Models with
    # recurrent states cannot be swapped.
    is_swapped = not {"sliding_window", "linear_num_key_heads"} & tiny.settings.keys()
    swap_space = 1 << 20 if is_swapped else 0
    settings = {**SETTINGS, "max_model_length": tiny.max_model_length, "swap_space": swap_space}
    one = load(folder, **settings)
    alone = outcome(one, tiny.shortest)
    for size in (2, 4):
        with ranked(folder, size, dtype="float32", **settings) as (runner, _):
            assert outcome(runner, tiny.shortest) == alone, f"{size} ranks"
            assert (runner.window_group is None) == (one.window_group is None)
    assert alone.cached[-1] > 0
    assert alone.preemptions > 0
    assert (alone.swapped > 0) == is_swapped
