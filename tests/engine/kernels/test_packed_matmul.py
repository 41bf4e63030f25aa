"""The kernel of packed weights against its twin in float64, and its memory layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, TILE_LANES, in_groups
from fastgen.kernels.cpu.matmul.packed import multiply
from fastgen.kernels.cpu.matmul.packed_layout import in_word_groups, packed_words, unpacked
from fastgen.model.layers.linear import as_array

ROWS = (*range(1, 10), 33, 131, 256, 259)  # the last have two panels of rows
# Bits, offset, blocks that share a half, steps, minimums: as in Q4_0, Q4_1, Q4_K, Q5_0, Q5_K, Q6_K, and groups of 128.
FORMS = [
    (4, 8, 1, False, False), (4, 0, 1, False, True), (4, 0, 8, True, True), (5, 16, 1, False, False),
    (5, 0, 8, True, True), (6, 32, 8, True, False), (4, 0, 4, False, True),
]  # fmt: skip
EMPTY = (0, 0, 0)


class Weights:
    """Random weights [outputs, blocks * BLOCK] of a form."""

    def __init__(self, outputs: int, blocks: int, form: tuple[int, int, int, bool, bool]) -> None:
        self.bits, self.offset, shared, has_steps, has_minimums = form
        rng = np.random.default_rng(outputs * blocks + self.bits)
        self.values = rng.integers(0, 1 << self.bits, (outputs, blocks * BLOCK), dtype=np.uint8)
        parts = blocks * 2 if self.bits == 6 else blocks
        self.halves = rng.uniform(-0.01, 0.01, (outputs, blocks // shared)).astype(np.float16)
        self.steps = rng.integers(-100, 64, (outputs, parts), dtype=np.int8) if has_steps else None
        self.minimums = np.zeros((outputs, 0), np.float16), None
        if has_minimums:
            halves = rng.uniform(-0.05, 0.05, (outputs, blocks // shared)).astype(np.float16)
            self.minimums = halves, (rng.integers(0, 64, (outputs, blocks), dtype=np.int8) if has_steps else None)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales [outputs, parts] and the minimums [outputs, blocks]."""
        blocks = self.values.shape[1] // BLOCK
        parts = blocks * 2 if self.bits == 6 else blocks

        def of(halves: npt.NDArray[np.float16], steps: npt.NDArray[np.int8] | None, count: int) -> torch.Tensor:
            if not halves.size:
                return torch.zeros(len(halves), count)
            wide = np.repeat(halves.astype(np.float32), count // halves.shape[1], axis=1)
            return torch.from_numpy(wide if steps is None else wide * steps)

        return of(self.halves, self.steps, parts), of(*self.minimums, blocks)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the kernel's [T, outputs], in the type of x."""
        words = in_word_groups(self.values, self.bits)
        laid = [words]
        for halves, steps in ((self.halves, self.steps), self.minimums):
            laid.append(in_groups(halves.view(np.uint16), halves.shape[1], TILE_LANES) if halves.size else
                        np.empty(EMPTY, np.uint16))  # fmt: skip
            laid.append(np.empty(EMPTY, np.int8) if steps is None else in_groups(steps, steps.shape[1], TILE_LANES))
        out = torch.full((len(x), len(words) * TILE_LANES), torch.nan, dtype=x.dtype)
        multiply(self.bits, as_array(x), *laid, self.offset, as_array(out))
        return out[:, : len(self.values)]

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.from_numpy(self.values.astype(np.int16) - self.offset)
        return reference.packed_product(x, values, *self.factors())

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest sum of absolute products [T, outputs], which rounding is relative to."""
        values = torch.from_numpy(np.abs(self.values.astype(np.int16) - self.offset))
        scales, minimums = (factors.abs() for factors in self.factors())
        return reference.packed_product(x.abs(), values, scales, -minimums)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_number_of_rows_are_those_of_the_twin(
    dtype: torch.dtype, form: tuple[int, int, int, bool, bool]
) -> None:
    torch.manual_seed(0)
    for outputs in (1, 48, 101):
        weights = Weights(outputs, 16, form)
        for rows in ROWS:
            x = (torch.randn(rows, 16 * BLOCK) * 10).to(dtype)
            expected = weights.expected(x)
            bound = weights.bound(x) * 1e-6 + (expected.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0)
            assert ((weights.product(x) - expected).abs() <= bound).all(), rows


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_sums_of_integers_are_exact(bits: int) -> None:
    """All scales are 1, so that a single misplaced or saturated product changes the result."""
    weights = Weights(50, 5, (bits, 1 << bits - 1, 1, False, False))
    weights.halves[:], weights.values[0], weights.values[1] = 1, 0, (1 << bits) - 1
    weights.halves = np.repeat(weights.halves, 1, axis=1)
    rng = np.random.default_rng(1)
    x = rng.integers(-127, 128, (9, 5 * BLOCK)).astype(np.float32)
    x[0], x[1] = 127, -127
    x[:, ::BLOCK] = 127  # the largest of each block
    out = weights.product(torch.from_numpy(x)).numpy()
    assert np.array_equal(out, x @ (weights.values.astype(np.float32) - weights.offset).T)


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_result_does_not_depend_on_other_rows(form: tuple[int, int, int, bool, bool]) -> None:
    torch.manual_seed(0)
    weights, x = Weights(100, 16, form), torch.randn(150, 16 * BLOCK)  # enough for several threads to quantise it
    together = weights.product(x)
    assert torch.equal(together, torch.cat([weights.product(x[row : row + 1]) for row in range(len(x))]))


def test_extreme_inputs_stay_in_their_row() -> None:
    weights = Weights(50, 8, FORMS[2])
    x = torch.ones(7, 8 * BLOCK)
    x[0] = 0
    x[1] *= 1e-40  # denormal: counts as 0
    x[2] *= 1e30
    x[3, 3], x[4, 40], x[5, 255] = torch.inf, -torch.inf, torch.nan
    out, alone = weights.product(x), weights.product(x[6:])
    assert not out[:2].any()
    assert ((out[2] - weights.expected(x[2:3])[0]).abs() <= weights.bound(x[2:3])[0] * 1e-6).all()
    assert torch.equal(out[6:], alone)
    assert not out[3:6].isfinite().any()


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_block_takes_as_many_words_as_a_value_has_bits(bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 1 << bits, (50, 3 * BLOCK), dtype=np.uint8)
    words = packed_words(values, bits)
    assert words.shape == (50, 3 * bits)
    assert words.nbytes * 8 == values.size * bits
    assert np.array_equal(unpacked(words, bits), values)
