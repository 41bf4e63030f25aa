"""Checkpoints with quantised weights, in every format: each is the model whose weights its values stand for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.layers.test_int8_models import relative_error
from engine.runner.test_gpu_path import generate, gpu_runner
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.packed_blocks import PackedBlocks
from fastgen.model.checkpoint.quantized.matrices import IntegerMatrix
from fastgen.model.native import open_checkpoint
from fastgen.model.processor import INT8_VARIABLE
from fastgen.model.source import ModelSource
from support.driving import load, run_in_chunks
from support.quantized_models import FORMATS, is_projection, model_of, save_mxfp4, save_quantized
from support.tiny_models import prompt

TOKENS = prompt(83)
BLOCKS = [1, 0, 2, 4, 5, 3]


def logits(folder: Path, *, dtype: str = "float32", quantization: str = "none") -> torch.Tensor:
    runner = load(folder, kv_cache_memory=4 << 20, block_size=16, dtype=dtype, quantization=quantization)
    return run_in_chunks(runner, TOKENS, BLOCKS, [60, 1, 22])


@pytest.mark.parametrize("family", ["llama-biases", "phi3", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_has_the_values_that_the_format_defines(tmp_path: Path, name: str, family: str) -> None:
    """Phi-3 stacks projections, whose parts are read from one quantised tensor."""
    ours, plain = map(opened, save_quantized(model_of(family), FORMATS[name], tmp_path))
    names = ours.architecture.tensor_shapes()
    assert len(names) > 20
    for tensor in names:
        found, expected = (open_checkpoint(source).tensor(tensor) for source in (ours, plain))
        assert found.dtype == torch.float32
        # Both round once, from float64 or in float32.
        torch.testing.assert_close(found, expected, atol=0, rtol=2e-7)


@pytest.mark.parametrize("name", ["float-quantized", "fp8 in blocks", "modelopt"])
@pytest.mark.parametrize("family", ["multimodal-gemma3", "multimodal-llava"])
def test_the_text_part_of_a_quantised_multimodal_checkpoint_is_read(tmp_path: Path, family: str, name: str) -> None:
    """Projections of the vision tower are quantised too, and ignored; config.json describes both parts at once."""
    ours, plain = map(opened, save_quantized(model_of(family), FORMATS[name], tmp_path))
    for tensor in ours.architecture.tensor_shapes():
        found, expected = (open_checkpoint(source).tensor(tensor) for source in (ours, plain))
        torch.testing.assert_close(found, expected, atol=0, rtol=2e-7)
    config = json.loads((ours.path / "config.json").read_text())
    described = config.pop("quantization_config")
    config["text_config"]["quantization_config"] = described
    (ours.path / "config.json").write_text(json.dumps(config))
    assert opened(ours.path).quantization == ours.quantization


def test_experts_in_mxfp4_have_the_values_of_the_specification(tmp_path: Path) -> None:
    ours, plain = map(opened, save_mxfp4(model_of("gpt-oss"), tmp_path))
    for tensor in ours.architecture.tensor_shapes():
        found, expected = (open_checkpoint(source).stored(tensor) for source in (ours, plain))
        assert torch.equal(found.float32(), expected.float32()), tensor
        if ".experts." in tensor and tensor.endswith("weight"):
            blocks = found.blocks()
            assert isinstance(blocks, PackedBlocks)
            for kept in (found.int8(), blocks):
                assert torch.equal(torch.from_numpy(kept.dequantised()), expected.float32()), tensor


@pytest.mark.parametrize("path", ["kernels", "operators"])
def test_tokens_of_experts_in_mxfp4_are_those_of_transformers_with_their_values(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INT8_VARIABLE, "weight-only")
    packed, plain = save_mxfp4(model_of("gpt-oss"), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0, -1]
    if path == "kernels":
        torch.testing.assert_close(logits(packed), expected, atol=1e-4, rtol=0)
        for quantization in ("int8", "stored"):  # experts are exact
            assert 0 < relative_error(logits(packed, quantization=quantization), expected) < 0.05
    else:
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        asked = [Request(id="a", prompt_token_ids=TOKENS, sampling=sampling)]
        ours, unquantised = (generate(gpu_runner(folder), asked)["a"] for folder in (packed, plain))
        assert ours == unquantised
        assert ours[0] == [int(expected.argmax())]


def opened(folder: Path) -> ModelSource:
    return ModelSource.open(str(folder))


@pytest.mark.parametrize("name", ["awq", "gptq with act-order", "pack-quantized asymmetric", "int-quantized"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_logits_in_float32_are_those_of_transformers_with_dequantised_weights(
    tmp_path: Path, name: str, family: str
) -> None:
    packed, plain = save_quantized(model_of(family), FORMATS[name], tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0, -1]
    torch.testing.assert_close(logits(packed), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptq", "fp8 in blocks", "float-quantized"])
def test_logits_in_bfloat16_are_those_of_the_dequantised_checkpoint(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("qwen3"), FORMATS[name], tmp_path)
    torch.testing.assert_close(logits(packed, dtype="bfloat16"), logits(plain, dtype="bfloat16"), atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_int8_blocks_keep_the_values_where_they_can_hold_them(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    ours, reference = open_checkpoint(opened(packed)), open_checkpoint(opened(plain))
    for tensor in opened(packed).architecture.tensor_shapes():
        if is_projection(tensor):
            blocks, exact = ours.stored(tensor).int8(), reference.tensor(tensor)
            error = (torch.from_numpy(blocks.dequantised()) - exact).abs().max() / exact.abs().max()
            assert error < 2e-7 if FORMATS[name].is_exact_in_int8 else 1e-5 < error < 5e-3


FOUR_BITS = {"awq", "gptq", "gptq asymmetric", "gptq v2", "pack-quantized", "pack-quantized asymmetric"}


@pytest.mark.parametrize("name", FORMATS)
def test_integers_of_four_bits_in_groups_stay_packed_and_keep_their_values(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    ours, reference = open_checkpoint(opened(packed)), open_checkpoint(opened(plain))
    for tensor in filter(is_projection, opened(packed).architecture.tensor_shapes()):
        blocks = ours.stored(tensor).blocks()
        has_four_bits = name in FOUR_BITS or (name == "gptq with other bits for some modules" and "down" not in tensor)
        assert isinstance(blocks, PackedBlocks if has_four_bits else Int8Blocks)
        if isinstance(blocks, PackedBlocks):
            found, exact = torch.from_numpy(blocks.dequantised()), reference.tensor(tensor)
            torch.testing.assert_close(found, exact, atol=2e-7 * exact.abs().max().item(), rtol=0)


def test_scales_that_float16_does_not_hold_are_not_packed() -> None:
    values = torch.tensor([[-12] * 32 + [12] * 32], dtype=torch.int8)
    for scale, bits in ((2.0**-24, 5), (2.0**15, 5), (2.0**-25, None), (2.0**16, None), (torch.inf, None)):
        matrix = IntegerMatrix(values, torch.tensor([[0.5, scale]]))
        packed = matrix.packed(5)
        assert (packed.bits if packed else None) == bits
        if packed is not None:
            assert torch.equal(torch.from_numpy(packed.dequantised()), matrix.float32())


@pytest.mark.parametrize("name", ["awq", "pack-quantized"])
def test_logits_with_packed_weights_are_close(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    assert 0 < relative_error(logits(packed, quantization="stored"), logits(plain)) < 0.05


@pytest.mark.parametrize("name", ["awq", "fp8 in blocks"])
def test_logits_with_int8_weights_are_close(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INT8_VARIABLE, "weight-only")
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    ours, exact = logits(packed, quantization="int8"), logits(plain)
    # The head is quantised too, in both.
    assert relative_error(ours, exact) < 0.05
    assert relative_error(ours, logits(plain, quantization="int8")) < 0.05


def test_rows_of_a_quantised_embedding_are_dequantised_as_they_are_looked_up(tmp_path: Path) -> None:
    stored = FORMATS["pack-quantized"]
    packed, plain = save_quantized(model_of("llama"), stored, tmp_path)
    ours, reference = open_checkpoint(opened(packed)), open_checkpoint(opened(plain))
    name = "model.layers.1.mlp.up_proj.weight"
    rows = torch.tensor(random.Random(3).sample(range(96), 20))
    assert torch.equal(ours.stored(name).table()(rows), reference.stored(name).table()(rows))
