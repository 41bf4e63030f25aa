"""Products with 4-bit integers: kernels against the twin, and the twin against the definition.

Tolerance: float32 sums of another order, rounded to float16. Products do not run in bfloat16, whose bits the
interpreter would multiply as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fastgen.kernels.gpu import int4

Import = Callable[[str], ModuleType]
TOLERANCE = 2**-10


def operands(
    rows: int, outputs: int, columns: int, groups: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs of the product, the unpacked integers of the weight, and their scales and offsets."""
    torch.manual_seed(rows + outputs)
    x = torch.randint(-8, 9, (rows, columns)).to(dtype) / 8
    integers = torch.randint(0, 16, (outputs, columns))
    scales = torch.exp2(torch.randint(-3, 3, (outputs, groups)).float())
    return x, integers, scales, -scales * torch.randint(0, 16, (outputs, groups))


CASES = [(1, 64, 128, 1), (3, 80, 256, 2), (16, 48, 192, 3), (17, 100, 96, 3), (64, 64, 640, 5), (65, 48, 256, 2)]


@pytest.mark.parametrize(("rows", "outputs", "columns", "groups"), [*CASES, (0, 16, 64, 1), (100, 33, 96, 3)])
def test_the_kernels_equal_their_twin(interpreted: Import, rows: int, outputs: int, columns: int, groups: int) -> None:
    """Groups of 128, 64 and 32 columns, outputs that end within a block, several parts, and rows beyond a tile."""
    x, integers, scales, offsets = operands(rows, outputs, columns, groups)
    packed = int4.packed_integers(integers)
    expected = int4.int4_product(x, packed, scales, offsets)
    found = interpreted("int4").int4_product(x, packed, scales, offsets)
    assert (found.dtype, found.shape) == (torch.float16, (rows, outputs))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE / 4)


def test_many_rows_in_bfloat16_are_multiplied_with_the_dequantised_weight(interpreted: Import) -> None:
    x, integers, scales, offsets = operands(70, 33, 96, 3, torch.bfloat16)
    packed = int4.packed_integers(integers)
    expected = int4.int4_product(x, packed, scales, offsets)
    assert torch.equal(interpreted("int4").int4_product(x, packed, scales, offsets), expected)


def test_the_twin_multiplies_the_values_that_integers_stand_for() -> None:
    x, integers, scales, offsets = operands(5, 24, 96, 3, torch.float16)
    values = integers * scales.repeat_interleave(32, 1) + offsets.repeat_interleave(32, 1)
    packed = int4.packed_integers(integers)
    assert (packed.dtype, packed.shape) == (torch.uint8, (24, 48))
    assert torch.equal(int4.dequantised(packed, scales, offsets), values)
    found = int4.int4_product(x, packed, scales, offsets)
    torch.testing.assert_close(found.float(), x.float() @ values.t(), rtol=2**-10, atol=2**-8)


def test_integers_are_packed_as_in_q4_0() -> None:
    columns = torch.arange(64)
    packed = int4.packed_integers((columns % 16)[None])
    assert packed.tolist() == [[17 * (number % 16) for number in range(32)]]
    low, high = int4.packed_integers((columns // 16)[None])[0, [0, 16]].tolist()
    assert (low, high) == (0x10, 0x32)


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_are_independent_of_each_other_and_of_their_number(interpreted: Import, rows: int) -> None:
    x, integers, scales, offsets = operands(64, 64, 256, 2, torch.float16)
    packed, product = int4.packed_integers(integers), interpreted("int4").int4_product
    all_rows = product(x, packed, scales, offsets)
    assert torch.equal(product(x[:rows].clone(), packed, scales, offsets), all_rows[:rows])
    x[3] = torch.nan
    others = product(x, packed, scales, offsets)
    assert others[3].isnan().all()
    assert torch.equal(others[:3], all_rows[:3])
