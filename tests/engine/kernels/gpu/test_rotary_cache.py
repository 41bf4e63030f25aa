"""Query-key norms, rotary positions and cache writes: kernel against twin, twin against the reference.

Tolerance: as in test_elementwise. In float8_e4m3fn, a value may round to the neighbour: 1/8 of it. The interpreter
also loses a carry into the exponent there, for one value of a hundred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from benchmarks.gpu.operator_bytes import rotary_cache_bytes

from fastgen.kernels import reference
from fastgen.kernels.gpu import rotary_cache

Import = Callable[[str], ModuleType]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
BLOCK_SIZE = 16
EMPTY = 3.0  # in slots that are not written


@dataclass
class Case:
    """Arguments for T rows, two of them padded if T > 2, and a cache that is a slice of two layers."""

    rows: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotated: int = 32
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    is_normed: bool = False
    scales: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.qkv = torch.randn(self.rows, (self.heads + 2 * self.kv_heads) * self.head_dim).to(self.dtype)
        self.norms = torch.rand(2, self.head_dim).unbind() if self.is_normed else (None, None)
        angles = torch.rand(50, self.rotated // 2) * 6
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.positions = torch.randint(50, (self.rows,), dtype=torch.int32)
        self.slots = torch.randperm(4 * BLOCK_SIZE)[: self.rows].int()
        if self.rows > 2:
            self.slots[-2:], self.positions[-2:] = -1, 0
        shape = 2, 2, 4, self.kv_heads, BLOCK_SIZE, self.head_dim
        self.caches = torch.full(shape, EMPTY).to(self.cache_dtype)

    def run(self, function: Callable[..., None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return qkv and both caches (as float32) after the call."""
        qkv, caches = self.qkv.clone(), self.caches.clone()
        angles, where = (self.cosines, self.sines), (self.positions, self.slots)
        function(qkv, *self.norms, *angles, *where, caches[0, 1], caches[1, 1], self.heads, 1e-6, *self.scales)
        return qkv, caches.float()


CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "float16 and norms": Case(dtype=torch.float16, cache_dtype=torch.float16, is_normed=True),
    "norms": Case(is_normed=True),
    "bfloat16 and norms": Case(
        dtype=torch.bfloat16, cache_dtype=torch.bfloat16, is_normed=True, head_dim=128, rotated=128
    ),
    "partial": Case(rotated=8),
    "partial and norms": Case(rotated=16, is_normed=True, head_dim=80),
    "odd sizes": Case(heads=3, kv_heads=3, head_dim=6, rotated=6, is_normed=True),
    "many heads": Case(heads=40, kv_heads=1, head_dim=64, rotated=64),
    "large heads": Case(heads=2, kv_heads=1, head_dim=256, rotated=256),
    "one row": Case(rows=1, heads=1, kv_heads=1),
    "no row": Case(rows=0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_its_twin(interpreted: Import, name: str) -> None:
    case = CASES[name]
    expected_qkv, expected_caches = case.run(rotary_cache.rotary_cache)
    qkv, caches = case.run(interpreted("rotary_cache").rotary_cache)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(qkv, expected_qkv, atol=2 * tolerance, rtol=2 * tolerance)
    torch.testing.assert_close(caches, expected_caches, atol=2 * tolerance, rtol=2 * tolerance)


def test_a_float8_cache_holds_scaled_and_clamped_values(interpreted: Import) -> None:
    case = Case(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scales=(0.02, 1e-3))
    expected_qkv, expected = case.run(rotary_cache.rotary_cache)
    qkv, caches = case.run(interpreted("rotary_cache").rotary_cache)
    torch.testing.assert_close(qkv, expected_qkv, atol=2**-7, rtol=2**-7)
    written = expected != EMPTY
    errors = (caches - expected)[written].abs()
    assert (errors <= expected[written].abs() / 8 + 2**-9).float().mean() > 0.98
    assert expected[1].abs().max() == 448
    block, offset = divmod(int(case.slots[0]), BLOCK_SIZE)
    value = case.qkv[0, -case.head_dim :].float()
    stored = expected[1, 1, block, -1, offset]
    torch.testing.assert_close(stored * 1e-3, value.clamp(-0.448, 0.448), atol=0, rtol=1 / 16)


def test_padded_rows_and_other_layers_are_not_written(interpreted: Import) -> None:
    case = Case()
    for function in (rotary_cache.rotary_cache, interpreted("rotary_cache").rotary_cache):
        _, caches = case.run(function)
        assert (caches[:, 0] == EMPTY).all()
        written = (caches[:, 1] != EMPTY).any(-1).sum()
        assert written == 2 * 3 * case.kv_heads


def test_a_padded_row_of_nan_stays_alone(interpreted: Import) -> None:
    case = Case(is_normed=True)
    expected_qkv, expected_caches = case.run(interpreted("rotary_cache").rotary_cache)
    case.qkv[-2:] = torch.nan
    qkv, caches = case.run(interpreted("rotary_cache").rotary_cache)
    assert torch.equal(qkv[:-2], expected_qkv[:-2])
    assert torch.equal(caches, expected_caches)


@pytest.mark.parametrize("rotated", [8, 32])
@pytest.mark.parametrize("is_normed", [False, True])
def test_the_twin_equals_the_reference(is_normed: bool, rotated: int) -> None:
    case = Case(is_normed=is_normed, rotated=rotated)
    queries, keys, values = case.qkv.view(5, -1, 32).split([4, 2, 2], 1)
    if is_normed:
        queries = reference.rms_norm(queries, case.norms[0], 1e-6)
        keys = reference.rms_norm(keys, case.norms[1], 1e-6)
    cosines, sines = case.cosines[case.positions.long()], case.sines[case.positions.long()]
    qkv, caches = case.run(rotary_cache.rotary_cache)
    torch.testing.assert_close(qkv.view(5, -1, 32)[:, :4], reference.rotate(queries, cosines, sines))
    assert torch.equal(qkv[:, 4 * 32 :], case.qkv[:, 4 * 32 :])
    turned = reference.rotate(keys, cosines, sines)
    for row, slot in enumerate(case.slots[:3].tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        torch.testing.assert_close(caches[0, 1, block, :, offset], turned[row])
        assert torch.equal(caches[1, 1, block, :, offset], values[row])


def test_bytes_count_every_operand_once() -> None:
    queries, keys_values = 2 * 4 * 64 * 2, 2 * 2 * 64 * (2 + 1)
    counted = rotary_cache_bytes(3, 4, 2, 64, rotated=32, element_bytes=2, cache_bytes=1)
    assert counted == 3 * (queries + keys_values + 2 * 16 * 4 + 8)
