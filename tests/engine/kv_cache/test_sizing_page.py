"""docs/sizing.md shows what the engine's functions compute for models with published numbers of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.sizing import CONFIGS, GPUS, MODELS, container_bytes, cpu_table, gpu_table, gpu_tokens

PAGE = Path(__file__).parents[3] / "docs" / "sizing.md"
# As their repositories on the hub count them.
PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen3-4B": 4_022_468_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
    "Gemma-2-9B": 9_241_705_984,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B": 70_553_706_496,
}


def test_the_shapes_are_those_of_the_models() -> None:
    assert {name: model.num_parameters for name, model in MODELS.items()} == PARAMETERS
    assert CONFIGS.keys() == PARAMETERS.keys()


def test_the_page_shows_what_is_computed() -> None:
    page = PAGE.read_text()
    assert f"\n\n{gpu_table()}\n\n" in page, "run `python -m benchmarks.sizing`"
    assert f"\n\n{cpu_table()}\n\n" in page, "run `python -m benchmarks.sizing`"


@pytest.mark.parametrize("name", MODELS)
def test_a_larger_gpu_holds_at_least_as_many_tokens(name: str) -> None:
    tokens = [gpu_tokens(MODELS[name], gib) for gib in GPUS]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_holds_the_longest_request_or_no_model(name: str) -> None:
    tokens = [gpu_tokens(MODELS[name], gib) for gib in GPUS]
    assert all(not each or each >= 8192 for each in tokens)


@pytest.mark.parametrize("name", MODELS)
def test_a_container_holds_more_than_the_weights(name: str) -> None:
    model = MODELS[name]
    assert container_bytes(model, "float32") > container_bytes(model, "bfloat16") > 2 * model.num_parameters
