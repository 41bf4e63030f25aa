"""Norms and gated activations: kernels against twins, twins against the CPU kernels' reference.

Tolerance: float32 sums of another order; in float16 a rounding may fall to the other side; the interpreter truncates
bfloat16, which a GPU rounds. So one unit in the last place, and some where a rounded value is processed further.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from benchmarks.gpu.operator_bytes import add_rms_norm_bytes, gated_activation_bytes

from fastgen.kernels import reference
from fastgen.kernels.gpu import elementwise

Import = Callable[[str], ModuleType]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("operands", ["none", "update", "normed update"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (3, 7), (2, 2048), (0, 16)])
def test_add_and_norm_equals_its_twin(
    interpreted: Import, rows: int, hidden: int, dtype: torch.dtype, operands: str
) -> None:
    torch.manual_seed(0)
    stream, update = torch.randn(2, rows, hidden).to(dtype)
    update_weight, weight = torch.rand(2, hidden)
    others = {"none": (None, None), "update": (update, None), "normed update": (update, update_weight)}[operands]
    expected_stream = stream.clone()
    expected = elementwise.add_rms_norm(expected_stream, *others, weight, 1e-5)
    normed = interpreted("elementwise").add_rms_norm(stream, *others, weight, 1e-5)
    assert normed.dtype == dtype
    error = TOLERANCE[dtype] * (4 if operands == "normed update" else 1)
    torch.testing.assert_close(stream, expected_stream, atol=error, rtol=error)
    torch.testing.assert_close(normed, expected, atol=2 * error, rtol=2 * error)


def test_rows_of_the_norm_are_independent(interpreted: Import) -> None:
    stream, update = torch.ones(3, 32), torch.ones(3, 32)
    stream[1], update[2, 0] = torch.nan, torch.inf
    normed = interpreted("elementwise").add_rms_norm(stream, update, None, torch.ones(32), 1e-6)
    torch.testing.assert_close(normed[0], torch.ones(32))
    assert normed[1].isnan().all()


def test_the_norm_of_large_values_does_not_overflow_in_the_streams_dtype(interpreted: Import) -> None:
    stream = torch.full((1, 64), 60000.0, dtype=torch.float16)
    normed = interpreted("elementwise").add_rms_norm(stream, None, None, torch.ones(64), 1e-6)
    torch.testing.assert_close(normed, torch.ones_like(normed))


def test_the_twin_of_the_norm_equals_the_reference() -> None:
    torch.manual_seed(0)
    stream, update, weight, update_weight = torch.randn(4, 5, 48)
    weight, update_weight = weight[0], update_weight[0]
    change = reference.rms_norm(update, update_weight, 1e-5)
    total, expected = reference.add_rms_norm(stream, change, weight, 1e-5)
    normed = elementwise.add_rms_norm(stream, update, update_weight, weight, 1e-5)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, expected)


def test_a_norm_of_an_absent_update_and_a_row_that_is_too_wide_are_rejected() -> None:
    with pytest.raises(ValueError, match="update_weight needs an update"):
        elementwise.add_rms_norm(torch.ones(1, 4), None, torch.ones(4), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="more than 16384"):
        elementwise.add_rms_norm(torch.ones(1, 16385), None, None, torch.ones(16385), 1e-5)


@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 9), (0, 16)])
def test_gated_activation_equals_its_twin(
    interpreted: Import, rows: int, width: int, dtype: torch.dtype, activation: str
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    out = interpreted("elementwise").gated_activation(gate_up, activation)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, elementwise.gated_activation(gate_up, activation), atol=2e-6, rtol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_both_tails_of_an_activation_are_exact(interpreted: Import, activation: str) -> None:
    gate_up = torch.tensor([[-3e38, -200.0, -0.0, 0.0, 200.0, 3e38] + [1.0] * 6])
    out = interpreted("elementwise").gated_activation(gate_up, activation)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 3e38]]))


def test_both_tails_of_the_clamped_activation_are_exact(interpreted: Import) -> None:
    gates, ups = [-3e38, -200.0, 0.0, 200.0, 3e38, 200.0, 200.0], [1.0, 1.0, 1.0, 3e38, 6.0, -3e38, -1.0]
    for activate in (interpreted("elementwise").gated_activation, elementwise.gated_activation):
        out = activate(torch.tensor([gates + ups]), "clamped_swiglu")
        torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 56.0, 49.0, -42.0, 0.0]]), atol=1e-3, rtol=0)
        assert activate(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]]), "clamped_swiglu").isnan().all()


def test_the_twins_of_activations_equal_the_reference() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 18) * 10
    silu = elementwise.gated_activation(gate_up, "silu")
    torch.testing.assert_close(silu, reference.silu_multiply(gate_up))
    gelu = elementwise.gated_activation(gate_up, "gelu_tanh")
    torch.testing.assert_close(gelu, reference.gelu_tanh_multiply(gate_up))
    clamped = elementwise.gated_activation(gate_up, "clamped_swiglu")
    torch.testing.assert_close(clamped, reference.clamped_swiglu_multiply(gate_up))
    with pytest.raises(ValueError, match="relu"):
        elementwise.gated_activation(gate_up, "relu")


def test_bytes_count_every_operand_once() -> None:
    row, weight = 5 * 64 * 2, 64 * 4
    count = add_rms_norm_bytes
    assert count(5, 64, 2, with_update=False, with_norm=False) == 2 * row + weight
    assert count(5, 64, 2, with_update=True, with_norm=True) == 4 * row + 2 * weight
    assert gated_activation_bytes(5, 64, 2) == 3 * row
