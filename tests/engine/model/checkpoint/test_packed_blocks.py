"""GGUF tensors in their own blocks: the values are those of their dequantisation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.checkpoint.test_gguf_types import random_blocks
from fastgen.model.checkpoint.gguf_types import TYPES, dequantise
from fastgen.model.checkpoint.packed_blocks import PackedBlocks
from fastgen.model.layers.int8_linear import WidenedLinear
from fastgen.model.layers.packed_linear import PackedLinear

BY_NAME = {kind.name: kind for kind in TYPES.values()}
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
ROWS, COLUMNS = 50, 768


def tensor(name: str) -> tuple[PackedBlocks, np.ndarray]:
    """Return a random tensor as blocks, and its values."""
    kind = BY_NAME[name]
    raw = random_blocks(name, ROWS * COLUMNS // kind.block).reshape(-1)
    blocks = PackedBlocks.of_tensor(raw, kind, COLUMNS)
    assert blocks is not None
    return blocks, dequantise(raw, kind).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("name", BITS)
def test_values_are_exact(name: str) -> None:
    blocks, values = tensor(name)
    assert blocks.bits == BITS[name]
    assert np.array_equal(blocks.dequantised(), values)
    chosen = np.array([3, 49, 0])
    assert np.array_equal(blocks.rows(chosen).dequantised(), values[chosen])
    both = PackedBlocks.stacked([blocks, blocks.rows(chosen)])
    assert np.array_equal(both.dequantised(), np.concatenate([values, values[chosen]]))
    assert both.form == blocks.form


def test_other_types_have_no_such_form() -> None:
    for name in BY_NAME.keys() - BITS.keys():
        kind = BY_NAME[name]
        assert PackedBlocks.of_tensor(np.zeros(kind.block_bytes * 768, np.uint8), kind, kind.block) is None


@pytest.mark.parametrize("name", BITS)
def test_a_packed_product_takes_the_tensors_bytes_and_is_an_embedding_table_too(name: str) -> None:
    kind, count = BY_NAME[name], 480
    raw = random_blocks(name, count * COLUMNS // kind.block).reshape(-1)
    blocks = PackedBlocks.of_tensor(raw, kind, COLUMNS)
    assert blocks is not None
    product = PackedLinear(blocks)
    assert product.num_bytes <= 1.1 * raw.nbytes
    rows = torch.tensor([479, 0, 47, 48, 0])
    assert np.array_equal(product.look_up(rows).numpy(), dequantise(raw, kind).reshape(count, -1)[rows.numpy()])


@pytest.mark.parametrize("name", BITS)
def test_products_are_within_a_percent_of_those_with_exact_activations(name: str) -> None:
    torch.manual_seed(0)
    blocks, values = tensor(name)
    x = torch.randn(20, COLUMNS)
    exact = x.double() @ torch.from_numpy(values).double().T
    product = PackedLinear(blocks)
    for dtype in (torch.float32, torch.bfloat16):
        out = product(x.to(dtype))
        assert out.dtype == dtype
        assert 0 < (out - exact).norm() / exact.norm() < 0.012
    assert WidenedLinear(product)(x.bfloat16()).dtype == torch.float32
    assert torch.equal(torch.cat([product(x[row : row + 1]) for row in range(20)]), product(x))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_found(value: float) -> None:
    blocks, _ = tensor("Q4_1")
    assert blocks.is_finite
    assert blocks.minimums is not None
    for halves in (blocks.scales.halves, blocks.minimums.halves):
        kept = halves[3, 2]
        halves[3, 2] = value
        assert not blocks.is_finite
        halves[3, 2] = kept
