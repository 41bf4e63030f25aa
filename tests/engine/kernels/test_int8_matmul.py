"""The int8 kernel against plain torch, and its memory layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu.matmul import int8
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, GROUP_LANES, in_groups


@pytest.mark.parametrize(("groups", "blocks"), [(1, 1), (5, 3), (36, 48)])
def test_products_of_any_number_of_rows_equal_the_reference(groups: int, blocks: int) -> None:
    rng = np.random.default_rng(groups)
    values = rng.integers(-128, 128, (groups, blocks * BLOCK, GROUP_LANES), dtype=np.int8)
    scales = rng.uniform(0.001, 0.01, (groups, blocks, GROUP_LANES)).astype(np.float32)
    for rows in (*range(1, 14), 64, 131):
        x = rng.standard_normal((rows, blocks * BLOCK), dtype=np.float32)
        out = np.full((rows, groups * GROUP_LANES), np.nan, np.float32)
        int8.multiply(x, values, scales, out)
        parts = [torch.from_numpy(part) for part in (x, values, scales)]
        expected = reference.int8_product(*(part.double() for part in parts))
        error = (torch.from_numpy(out).double() - expected).abs().max()
        assert error <= 2e-6 * expected.abs().max(), rows


def test_every_weight_is_multiplied_by_its_own_input_and_scale() -> None:
    """Uses integers that float32 sums exactly, so that a single misplaced weight changes the result."""
    rng = np.random.default_rng(1)
    matrix = rng.integers(-128, 128, (2 * GROUP_LANES, 3 * BLOCK), dtype=np.int8)
    scales = rng.integers(1, 5, (2 * GROUP_LANES, 3)).astype(np.float32)
    x = rng.integers(-3, 4, (7, 3 * BLOCK)).astype(np.float32)
    out = np.empty((7, 2 * GROUP_LANES), np.float32)
    int8.multiply(x, in_groups(matrix, 3 * BLOCK), in_groups(scales, 3), out)
    assert np.array_equal(out, x @ (matrix * np.repeat(scales, BLOCK, axis=1)).T)


@pytest.mark.parametrize(("rows", "given", "columns"), [(1, 1, 32), (16, 32, 32), (35, 7, 32), (64, 3, 3)])
def test_the_layout_stores_rows_in_lanes_and_pads_with_zeros(rows: int, given: int, columns: int) -> None:
    matrix = np.random.default_rng(0).integers(1, 100, (rows, given), dtype=np.int8)
    laid = in_groups(matrix, columns)
    back = laid.swapaxes(1, 2).reshape(-1, columns)
    assert np.array_equal(back[:rows, :given], matrix)
    assert not back[rows:].any()
    assert not back[:, given:].any()
