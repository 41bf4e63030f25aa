"""Models with --quantization int8: with activations in float32 exact if the file has int8 blocks, otherwise close.

Tests of the demo model run with each product of the processor: weight-only, and vnni in float32 and in bfloat16.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.model.config.test_gguf_families import TOKENS, build
from fastgen.core.sampling_params import SamplingParams
from fastgen.kernels.cpu.vector_width import has_vnni
from fastgen.model.layers.int8_linear import Int8Linear, Int8VNNILinear
from fastgen.model.processor import INT8_VARIABLE
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.text.tokenizer import Tokenizer
from support.demo_weights import demo_model
from support.driving import generate, load, run_in_chunks
from support.gguf_writing import write_gguf
from support.perplexity import perplexity, text_tokens
from support.prompts import PROMPTS
from support.tiny_models import TINY


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "phi3 with a window", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_file_with_int8_blocks_gives_the_logits_of_its_float32_values(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INT8_VARIABLE, "weight-only")
    path = write_gguf(build(name), tmp_path / "tiny.gguf", kind)
    exact, kept = (
        run_in_chunks(
            load(path, kv_cache_memory=4 << 20, block_size=16, quantization=quantization),
            TOKENS,
            [1, 0, 2, 4, 5, 3],
            [83],
        )
        for quantization in ("none", "int8")
    )
    torch.testing.assert_close(kept, exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "phi3 with a window", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_activations_change_the_logits_by_a_few_percent(
    tmp_path: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_vnni()
    monkeypatch.setenv(INT8_VARIABLE, "vnni")
    path = write_gguf(build(name), tmp_path / "tiny.gguf", "Q8_0")
    exact, kept = (
        run_in_chunks(
            load(path, kv_cache_memory=4 << 20, block_size=16, quantization=quantization, dtype=kind),
            TOKENS,
            [1, 0, 2, 4, 5, 3],
            [60, *[1] * 23],
        )
        for quantization, kind in (("none", "float32"), ("int8", dtype))
    )
    # A router's choice between two experts may change.
    assert 0 < relative_error(kept, exact) < (0.15 if name == "mixtral" else 0.05)


@pytest.mark.parametrize("product", ["weight-only", "vnni"])
@pytest.mark.parametrize(
    "name", ["qwen3", "ernie4-5", "olmo2", "granite", "gemma4-moe"]
)  # ernie4-5: rows are read in another order
def test_quantised_hugging_face_logits_are_within_a_few_percent(
    tmp_path: Path, name: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if product == "vnni":
        require_vnni()
    monkeypatch.setenv(INT8_VARIABLE, product)
    (build(name) if name == "qwen3" else TINY[name].build()).save_pretrained(tmp_path)
    blocks = random.Random(3).sample(range(6), 6)
    exact, kept = (
        run_in_chunks(
            load(tmp_path, kv_cache_memory=4 << 20, block_size=16, quantization=quantization), TOKENS, blocks, [83]
        )
        for quantization in ("none", "int8")
    )
    assert 0 < relative_error(kept, exact) < 0.05


def require_vnni() -> None:
    if not has_vnni():
        pytest.skip("the kernels' target processor has no AVX512-VNNI")


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Compare logits up to a constant, which does not change probabilities."""
    return float(((ours - ours.mean()) - (exact - exact.mean())).norm() / (exact - exact.mean()).norm())


def divergence(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of next-token probabilities in nats."""
    expected, found = exact.log_softmax(-1), ours.log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum())


@pytest.fixture(scope="module", params=["weight-only", "vnni", "vnni in bfloat16"])
def int8_demo(request: pytest.FixtureRequest) -> ModelRunner:
    product, _, dtype = str(request.param).partition(" in ")
    if product == "vnni":
        require_vnni()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INT8_VARIABLE, product)
        runner = load(demo_model(), quantization="int8", dtype=dtype or "float32")
    assert runner.dtype == (dtype or "float32")
    return runner


@pytest.fixture(scope="module")
def prompts(demo_source: ModelSource) -> list[list[int]]:
    tokenizer = Tokenizer.load(demo_source.tokenizer)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    return [tokens for tokens in encoded if len(tokens) <= 24]


def is_weight_only(runner: ModelRunner) -> bool:
    return isinstance(runner._model._weights.layers[0].qkv, Int8Linear)


@pytest.mark.slow
def test_next_token_probabilities_of_the_demo_model_stay_close_to_float32(
    int8_demo: ModelRunner, demo_runner: ModelRunner, prompts: list[list[int]]
) -> None:
    assert len(prompts) > 10
    errors, divergences = [], []
    for prompt in prompts:
        ours, exact = (run_in_chunks(runner, prompt, [0], [64]) for runner in (int8_demo, demo_runner))
        errors.append(relative_error(ours, exact))
        divergences.append(divergence(ours, exact))
    most, mean, nats = (0.06, 0.03, 0.005) if is_weight_only(int8_demo) else (0.12, 0.07, 0.015)
    assert max(errors) < most, errors
    assert sum(errors) / len(errors) < mean, errors
    assert sum(divergences) / len(divergences) < nats, divergences


@pytest.mark.slow
def test_perplexity_of_the_demo_model_is_within_two_percent_of_float32(
    int8_demo: ModelRunner, demo_runner: ModelRunner, demo_source: ModelSource
) -> None:
    tokens = text_tokens(demo_source)[:192]
    ours, exact = (perplexity(runner, tokens) for runner in (int8_demo, demo_runner))
    assert ours != exact
    assert abs(ours / exact - 1) < 0.02


@pytest.mark.slow
def test_greedy_tokens_of_the_demo_model_mostly_agree_with_float32(
    int8_demo: ModelRunner, demo_runner: ModelRunner, prompts: list[list[int]]
) -> None:
    """Count the tokens before the first difference, because all later tokens differ too."""
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ours, theirs = (
        generate(runner, prompts, sampling, token_budget=256, at_once=16).tokens for runner in (int8_demo, demo_runner)
    )
    same = [
        next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), 8)
        for a, b in zip(ours, theirs, strict=True)
    ]
    share = 0.8 if is_weight_only(int8_demo) else 0.6
    assert sum(same) >= share * 8 * len(prompts), same


@pytest.mark.slow
def test_int8_matrices_of_a_model_take_less_than_a_third_of_float32_bytes(int8_demo: ModelRunner) -> None:
    weights = int8_demo._model._weights
    held, parameters = 0, 0
    for layer in weights.layers:
        for product in (layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(product, Int8Linear | Int8VNNILinear)
            held += product.num_bytes
            parameters += product._rows * product._columns
    assert parameters > 100_000_000
    assert held < 4 * parameters / 3
