"""Quantisation of activations to float8: the kernel against its twin, and the twin against the definition.

Tolerance: a division and a product may round to the other side, which moves a value to the next float8.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fastgen.kernels.gpu import float8

Import = Callable[[str], ModuleType]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 2048), (2, 2064), (5, 4100), (0, 16)])
def test_the_kernel_equals_its_twin(interpreted: Import, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, width) * torch.logspace(-6, 4, rows)[:, None]).to(dtype)
    values, scales = interpreted("float8").quantise_rows(x)
    expected, expected_scales = float8.quantise_rows(x)
    assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, x.shape, (rows, 1))
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # The step of a float8 is an eighth of its power of 2; subnormal ones are steps of 2**-9.
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.125, atol=2**-9)
    assert (values.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99 or not rows


@pytest.mark.parametrize("quantise", ["kernel", "twin"])
def test_rows_are_independent_and_edges_are_defined(interpreted: Import, quantise: str) -> None:
    x = torch.ones(5, 40)
    x[0] = torch.linspace(-3, 3, 40)
    x[1], x[2, 7], x[3, 7] = 0, torch.nan, torch.inf
    x[4] = 3e38
    values, scales = (interpreted("float8") if quantise == "kernel" else float8).quantise_rows(x)
    decoded = values.float() * scales
    assert values[0].float().abs().max() == 448
    torch.testing.assert_close(decoded[0], x[0], rtol=1 / 16, atol=3 / 448 / 512)
    assert (decoded[1] == 0).all()
    assert decoded[2].isnan().all()
    assert not decoded[3, 7].isfinite()
    torch.testing.assert_close(decoded[4], x[4], rtol=1e-6, atol=0)
