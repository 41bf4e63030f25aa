"""Weights that stay 4-bit integers on a GPU: which ones do, what their products compute, and what they cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.gpu.launches import Counting

from engine.model.config.test_gguf_families import build
from engine.model.layers.test_float8_linear import CPU, hidden, products, weights_of
from engine.model.layers.test_int8_models import relative_error
from engine.model.layers.test_weight_reader import DelayedCopier
from fastgen.kernels.gpu.int4 import packed_integers
from fastgen.model.checkpoint.checkpoint import Part
from fastgen.model.layers.gpu_backend import GPUFormat
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.int4_linear import Int4Linear
from fastgen.model.layers.linear import PlainLinear
from fastgen.model.layers.weight_reader import WeightReader
from fastgen.model.layers.weights import Mixture
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.gguf_writing import write_gguf
from support.quantized_models import FORMATS, model_of, save_quantized

QUERIES = "model.layers.1.self_attn.q_proj.weight"
KEPT = [
    "awq",
    "gptq",
    "gptq asymmetric",
    "gptq with act-order",
    "gptq v2",
    "pack-quantized",
    "pack-quantized asymmetric",
    "pack-quantized with act-order",
]


@pytest.mark.parametrize("family", ["llama-biases", "phi3"])
@pytest.mark.parametrize("name", KEPT)
def test_four_bit_weights_stay_four_bits(tmp_path: Path, name: str, family: str) -> None:
    packed, plain = save_quantized(model_of(family), FORMATS[name], tmp_path)
    kept, exact = weights_of(packed), weights_of(plain, torch.float32)
    for ours, reference in zip(products(kept), products(exact), strict=True):
        assert isinstance(ours, Int4Linear)
        found, expected = ours.dequantised(torch.float32), reference.weight
        torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * 1e-6, rtol=0)
        rows, columns = expected.shape
        assert ours.num_bytes == rows * columns // 2 + rows * columns // 32 * 8
        x = torch.randn(5, columns).bfloat16()
        error = float(expected.abs().max()) * 2**-6 * columns**0.5
        torch.testing.assert_close(ours(x).float(), x.float() @ expected.t(), atol=error, rtol=2**-7)
    assert isinstance(kept.head, TorchHead)


@pytest.mark.parametrize("name", ["awq", "gptq with act-order"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    assert relative_error(hidden(packed), hidden(plain)) < 0.02


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3 with a window"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_weights_of_gguf_files_stay_four_bits(tmp_path: Path, kind: str, family: str) -> None:
    """Llama's queries and keys have permuted rows, and Phi-3's projections are stacked."""
    path = write_gguf(build(family), tmp_path / "tiny.gguf", kind)
    kept, exact = weights_of(path), weights_of(path, torch.float32)
    for ours, reference in zip(products(kept), products(exact), strict=True):
        assert isinstance(ours, Int4Linear)
        found, expected = ours.dequantised(torch.float32), reference.weight
        torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * 1e-6, rtol=0)


def test_a_product_whose_parts_have_other_types_is_dequantised(tmp_path: Path) -> None:
    """llama.cpp stores the values' projection of some layers in more bits than those of queries and keys."""
    path = write_gguf(build("llama"), tmp_path / "tiny.gguf", "Q4_0")
    other = write_gguf(build("llama"), tmp_path / "other.gguf", "Q8_0")
    parts = [open_checkpoint(ModelSource.open(str(file))).stored(QUERIES) for file in (path, path, other)]
    assert isinstance(GPUFormat(CPU, torch.bfloat16).linear(parts[:2]), Int4Linear)
    mixed = GPUFormat(CPU, torch.bfloat16).linear(parts)
    assert isinstance(mixed, PlainLinear)
    assert torch.equal(mixed.weight, torch.cat([part.float32() for part in parts]).bfloat16())


def test_weights_that_threads_read_are_the_same(tmp_path: Path) -> None:
    packed, _ = save_quantized(model_of("llama"), FORMATS["gptq with act-order"], tmp_path)
    threaded, direct = weights_of(packed, reader=WeightReader(CPU, DelayedCopier, 3)), weights_of(packed)
    for ours, reference in zip(products(threaded), products(direct), strict=True):
        for part in Int4Linear.__slots__:
            assert torch.equal(getattr(ours, part), getattr(reference, part)), part


def test_experts_and_routers_are_dequantised(tmp_path: Path) -> None:
    packed, plain = save_quantized(model_of("mixtral"), FORMATS["gptq with act-order"], tmp_path)
    for ours, reference in zip(weights_of(packed).layers, weights_of(plain).layers, strict=True):
        assert isinstance(ours.mlp, Mixture)
        assert isinstance(reference.mlp, Mixture)
        assert isinstance(ours.mlp.router, PlainLinear)
        for found, expected in zip(ours.mlp.experts, reference.mlp.experts, strict=True):
            torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("awq", torch.float32),
        ("awq by its old names", torch.bfloat16),  # groups of 16
        ("gptq 8 bit", torch.bfloat16),
        ("pack-quantized 8 bit", torch.bfloat16),
        ("int-quantized", torch.bfloat16),
    ],
)
def test_other_weights_are_dequantised(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    for ours, reference in zip(products(weights_of(packed, dtype)), products(weights_of(plain, dtype)), strict=True):
        assert isinstance(ours, PlainLinear)
        torch.testing.assert_close(ours.weight, reference.weight, atol=0, rtol=2**-7)


DOWN = "model.layers.1.mlp.down_proj.weight"
COLUMNS = {"whole groups": range(32, 96), "cut groups": range(48, 96)}


@pytest.mark.parametrize(
    ("name", "columns", "stays"),
    [
        ("awq", "whole groups", True),
        ("pack-quantized", "whole groups", True),
        ("awq", "cut groups", False),
        ("gptq with act-order", "whole groups", False),
    ],
)
def test_columns_of_a_rank_stay_four_bits_if_they_are_whole_groups(
    tmp_path: Path, name: str, columns: str, stays: bool
) -> None:
    packed, plain = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    ours, reference = (open_checkpoint(ModelSource.open(str(folder))).stored(DOWN) for folder in (packed, plain))
    some = COLUMNS[columns]
    product = GPUFormat(CPU, torch.bfloat16).linear([ours.part(Part(columns=some))])
    expected = reference.float32()[:, some.start : some.stop]
    assert isinstance(product, Int4Linear if stays else PlainLinear)
    found = product.dequantised(torch.float32) if isinstance(product, Int4Linear) else product.weight.float()
    error = 1e-6 if stays else 2**-8
    torch.testing.assert_close(found, expected, atol=float(expected.abs().max()) * error, rtol=0)


@pytest.mark.parametrize("has_order", [False, True])
def test_a_product_takes_two_launches_and_one_more_for_another_order(has_order: bool) -> None:
    packed, scales = packed_integers(torch.ones(32, 64)), torch.ones(32, 2)
    x, order = torch.ones(3, 64, dtype=torch.bfloat16), torch.arange(64) if has_order else None
    with Counting() as counting:
        Int4Linear(packed, scales, scales, order)(x)
    expected = {"_multiply": 1, "_sum_parts": 1} | ({"index_select": 1} if has_order else {})
    assert counting.launches == expected
    assert not counting.waits
