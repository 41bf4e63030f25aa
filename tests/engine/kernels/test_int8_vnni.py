"""The int8 kernel with quantised activations against its twin: equal, because its integers are exact.

Its sums in float32 are fused multiply-adds in a fixed order. The twin computes them in double precision and rounds them
once more, so a result may differ in its last place where the double lies next to the middle of two floats.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, TILE_LANES, in_byte_groups, in_groups
from fastgen.kernels.cpu.vector_width import has_vnni
from fastgen.model.layers.linear import as_array

if not has_vnni():
    pytest.skip("the kernels' target processor has no AVX512-VNNI", allow_module_level=True)

from fastgen.kernels.cpu.matmul import int8_vnni

ROWS = (*range(1, 10), 31, 64, 131)
Int8Array = npt.NDArray[np.int8]
FloatArray = npt.NDArray[np.float32]


def product(x: torch.Tensor, values: Int8Array, scales: FloatArray) -> torch.Tensor:
    """Return the kernel's [T, out] for weights [out, in] and scales [out, blocks]."""
    out = torch.full((len(x), -(-len(values) // TILE_LANES) * TILE_LANES), torch.nan, dtype=x.dtype)
    laid = in_byte_groups(values), in_groups(scales, scales.shape[1], TILE_LANES)
    int8_vnni.multiply(as_array(x), *laid, as_array(out))
    return out[:, : len(values)]


def expected(x: torch.Tensor, values: Int8Array, scales: FloatArray) -> torch.Tensor:
    return reference.int8_dynamic_product(x, torch.from_numpy(values), torch.from_numpy(scales)).to(x.dtype)


def weights(outputs: int, inputs: int) -> tuple[Int8Array, FloatArray]:
    rng = np.random.default_rng(outputs * inputs)
    values = rng.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    return values, rng.uniform(0.001, 0.01, (outputs, -(-inputs // BLOCK))).astype(np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (48, 32), (49, 33), (100, 70), (960, 576), (97, 1536)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_number_of_rows_equal_the_reference(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    values, scales = weights(outputs, inputs)
    for rows in ROWS:
        x = (torch.randn(rows, inputs) * 10).to(dtype)
        ours, theirs = product(x, values, scales), expected(x, values, scales)
        assert (ours == theirs).float().mean() > 0.999, rows
        last_place = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-23
        bound = expected(x.abs(), np.abs(values.astype(np.int16)).clip(max=127).astype(np.int8), scales).float()
        assert ((ours.float() - theirs.float()).abs() <= bound * last_place).all(), rows


def test_sums_of_integers_are_exact() -> None:
    """All scales are 1, so that a single misplaced or saturated product changes the result."""
    rng = np.random.default_rng(1)
    values = rng.integers(-128, 128, (2 * TILE_LANES + 5, 5 * BLOCK), dtype=np.int8)
    values[0], values[1] = 127, -128
    x = rng.integers(-127, 128, (9, 5 * BLOCK)).astype(np.float32)
    x[0], x[1] = 127, -127
    x[:, ::BLOCK] = 127  # the largest of each block
    out = product(torch.from_numpy(x), values, np.ones((len(values), 5), np.float32)).numpy()
    assert np.array_equal(out, x @ values.T.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_result_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values, scales = weights(100, 576)
    x = torch.randn(150, 576).to(dtype)  # enough for several threads to quantise it
    together = product(x, values, scales)
    alone = torch.cat([product(x[row : row + 1], values, scales) for row in range(len(x))])
    assert torch.equal(together, alone)


def test_each_block_has_its_own_scale_and_ties_are_rounded_to_even() -> None:
    x = torch.zeros(1, 3 * BLOCK)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 127, 0.5, 1.5, -2.5
    x[0, BLOCK], x[0, BLOCK + 1] = -127e6, 3e6  # the next block's inputs are not lost beside a large one
    x[0, 2 * BLOCK], x[0, 2 * BLOCK + 1] = 127e-6, 3e-6
    values = np.zeros((8, 3 * BLOCK), np.int8)
    for output, column in enumerate((0, 1, 2, 3, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)):
        values[output, column] = 1
    out = product(x, values, np.ones((8, 3), np.float32))[0]
    torch.testing.assert_close(out, torch.tensor([127, 0, 2, -2, -127e6, 3e6, 127e-6, 3e-6]), rtol=1e-6, atol=0)


def test_extreme_inputs_stay_in_their_row() -> None:
    values, scales = weights(50, 2 * BLOCK)
    x = torch.ones(9, 2 * BLOCK)
    x[0] = 0
    x[1, :BLOCK] = -0.0
    x[2] *= 1e-40  # denormal: counts as 0
    x[3] *= 1e-35
    x[4] *= 1e30
    x[5, 3] = torch.inf
    x[6, 40] = -torch.inf
    x[7, 63] = torch.nan
    out, finite = product(x, values, scales), product(x[8:], values, scales)[0]
    assert not out[0].any()
    assert not out[2].any()
    theirs = expected(x, values, scales)
    for row in (1, 3, 4, 8):
        torch.testing.assert_close(out[row], theirs[row], rtol=1e-6, atol=0)
    assert torch.equal(out[8], finite)
    assert not out[5:8].isfinite().any()


def test_a_product_is_within_one_and_a_half_percent_of_that_with_exact_activations() -> None:
    torch.manual_seed(0)
    values, scales = weights(200, 576)
    x = torch.randn(32, 576)
    exact = x @ torch.from_numpy(values * np.repeat(scales, BLOCK, axis=1)).T
    error = (product(x, values, scales) - exact).norm() / exact.norm()
    assert 0 < error < 0.015


def test_the_layout_holds_four_raised_inputs_of_an_output_together() -> None:
    values = np.random.default_rng(0).integers(-128, 128, (50, 35), dtype=np.int8)
    laid = in_byte_groups(values)
    assert laid.shape == (2, 16, TILE_LANES)
    back = laid.swapaxes(1, 2).reshape(2 * TILE_LANES, 16).copy().view(np.uint8)[:50, :35]
    assert np.array_equal(back.astype(np.int16) - 128, values)
