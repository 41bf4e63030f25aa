"""Int8 matrices: exactness, error bounds and memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.model.checkpoint.test_gguf_types import random_blocks
from fastgen.model.checkpoint.gguf_types import TYPES, dequantise
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.layers.int8_linear import Int8Linear


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_integer_blocks_are_converted_exactly(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    raw = random_blocks(kind, 12).reshape(-1)
    blocks = Int8Blocks.of_tensor(raw, TYPES[quantisation], columns=64)
    exact = dequantise(raw, TYPES[quantisation]).reshape(6, 64)
    assert np.array_equal(blocks.dequantised(), exact)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "IQ4_NL"])
def test_other_types_are_quantised_to_within_half_a_step_per_block(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    raw = random_blocks(kind, 12).reshape(-1)
    blocks = Int8Blocks.of_tensor(raw, TYPES[quantisation], columns=64)
    exact = dequantise(raw, TYPES[quantisation]).reshape(6, 64)
    assert within_half_a_step(blocks, exact)


def within_half_a_step(blocks: Int8Blocks, exact: np.ndarray) -> bool:
    half = np.repeat(blocks.scales, 32, axis=1)[:, : exact.shape[1]] * np.float32(0.501)
    return bool((np.abs(blocks.dequantised() - exact) <= half).all())


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (100, 96), (70, 33)])
def test_quantising_is_within_half_a_step_and_zeros_stay_zeros(rows: int, columns: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    matrix[rows // 2] = 0
    blocks = Int8Blocks.quantise(matrix)
    assert within_half_a_step(blocks, matrix)
    assert not blocks.dequantised()[rows // 2].any()


def test_the_largest_value_of_every_block_is_exact_to_the_last_bits() -> None:
    matrix = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    blocks = matrix.reshape(8, 2, 32)
    largest = np.abs(blocks).argmax(axis=2)[..., None]
    expected = np.take_along_axis(blocks, largest, axis=2)
    ours = np.take_along_axis(Int8Blocks.quantise(matrix).dequantised().reshape(8, 2, 32), largest, axis=2)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_padding_of_tiny_values_does_not_reach_the_rows_that_follow() -> None:
    matrix = torch.randn(130, 33).numpy()
    matrix[:64] *= 1e-44  # their inverse scales are infinite
    with np.errstate(all="ignore"):
        blocks, alone = Int8Blocks.quantise(matrix), Int8Blocks.quantise(matrix[64:])
    assert np.array_equal(blocks.values[64:], alone.values)
    assert np.array_equal(blocks.scales[64:], alone.scales)


@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (31, 17), (1, 5), (48, 40)])
def test_the_product_equals_that_with_the_dequantised_matrix(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    blocks = Int8Blocks.quantise(torch.randn(rows, columns).numpy())
    product, exact = Int8Linear(blocks), torch.from_numpy(blocks.dequantised())
    for count in (1, 3, 8, 100):
        x = torch.randn(count, columns)
        y = product(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, exact), atol=2e-4, rtol=1e-5)


def test_the_product_is_within_one_percent_of_float32() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(512, 576) * torch.rand(512, 1), torch.randn(32, 576)
    exact = F.linear(x, weight)
    error = (Int8Linear(Int8Blocks.quantise(weight.numpy()))(x) - exact).norm() / exact.norm()
    assert error < 0.01


def test_an_int8_matrix_takes_less_than_a_third_of_float32_memory() -> None:
    weight = np.zeros((960, 576), np.float32)
    assert Int8Linear(Int8Blocks.quantise(weight)).num_bytes == weight.nbytes * 9 // 32
