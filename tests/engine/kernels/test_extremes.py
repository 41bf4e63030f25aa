"""Every kernel at odd sizes, with values at which float32 overflows, underflows or loses its sign.

No NaN or infinity comes out where the reference has none. `test_instruction_sets` runs these tests once more for each
instruction set that the processor can execute.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu import elementwise
from fastgen.kernels.cpu.jit import serial
from fastgen.kernels.cpu.matmul import bfloat16, float32, int8
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, GROUP_LANES
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from support.paged_attention import Paged, chunks, decode

SIZES = (*range(1, 18), 31, 33, 63, 65, 100)
TINY = 1e-40  # a denormal
EXTREMES = (0.0, -0.0, 1.0, -1.0, 88.0, -88.0, 88.5, -88.5, 89.0, -89.0, 200.0, -200.0, 1e30, -1e30, TINY, -TINY)
SMALLEST = float(np.finfo(np.float32).tiny)  # results below it may be rounded to 0


def extremes(rows: int, width: int, *, step: int = 1) -> torch.Tensor:
    """Return [rows, width] of extreme values: every column has all of them within 16 rows, next to different ones."""
    count = len(EXTREMES)
    places = torch.arange(rows)[:, None] * step + torch.arange(width)[None, :] * 7
    return torch.tensor(EXTREMES)[places // (count if step > 1 else 1) % count].contiguous()


def uniform(width: int) -> torch.Tensor:
    """Return [16, width]: each row repeats one extreme value."""
    return torch.tensor(EXTREMES)[:, None].repeat(1, width)


def assert_finite_and_close(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Assert that `out` is within `bound` of `expected` wherever that is finite in float32."""
    finite = expected.float().isfinite()
    assert finite.any()
    assert out[finite].isfinite().all(), f"{int((~out[finite].isfinite()).sum())} of {out.numel()} are not finite"
    error = (out.double() - expected.double()).abs()[finite]
    limit = (torch.as_tensor(bound, dtype=torch.float64).expand(out.shape))[finite]
    assert (error <= limit).all(), f"an error of {float(error.max())}"


@serial
def divide(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    quotients: npt.NDArray[np.float32],
    roots: npt.NDArray[np.float32],
) -> None:
    """quotients = a / b; roots = 1 / sqrt(b)."""
    for i in range(len(a)):
        quotients[i] = a[i] / b[i]
        roots[i] = np.float32(1) / np.sqrt(b[i])


@pytest.mark.parametrize("width", SIZES)
def test_compiled_divisions_are_rounded_once_even_for_infinity(width: int) -> None:
    """Estimates of reciprocals, which LLVM may use in loops, give NaN for infinity and are less exact elsewhere."""
    divisors = torch.tensor([torch.inf, 1e30, 3e38, SMALLEST, TINY, 3.0, 0.0])
    for step in range(len(divisors)):
        a = extremes(1, width)[0]
        b = divisors[(torch.arange(width) + step) % len(divisors)]
        quotients, roots = torch.empty(width), torch.empty(width)
        divide(a.numpy(), b.numpy(), quotients.numpy(), roots.numpy())
        assert np.array_equal(quotients, a / b, equal_nan=True)
        assert np.allclose(roots, 1 / b.sqrt(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("name", ["silu_multiply", "gelu_tanh_multiply", "clamped_swiglu_multiply"])
def test_gates_are_right_for_every_pair_of_extreme_values(name: str, width: int) -> None:
    pairs = torch.tensor(list(itertools.product(EXTREMES, EXTREMES)))
    places = (torch.arange(len(pairs))[:, None] + torch.arange(width)[None, :] * 5) % len(pairs)
    gate_up = torch.cat([pairs[places, 0], pairs[places, 1]], 1).contiguous()
    out = torch.full((len(pairs), width), torch.nan)
    getattr(elementwise, name)(gate_up.numpy(), out.numpy())
    expected = getattr(reference, name)(gate_up)
    assert_finite_and_close(out, expected, expected.abs() * 2e-5 + 5e-6)


@pytest.mark.parametrize("width", SIZES)
def test_norms_are_right_for_extreme_values(width: int) -> None:
    torch.manual_seed(0)
    weight = torch.rand(width)
    for x in (uniform(width), extremes(16, width)):
        for update in (torch.zeros_like(x), x, -x, x.flip(0)):
            total, normed = reference.add_rms_norm(x, update, weight, 1e-5)
            summed, out = x.clone(), torch.full_like(x, torch.nan)
            elementwise.add_rms_norm(summed.numpy(), update.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())
            assert torch.equal(summed, total)
            assert_finite_and_close(out, normed, 1e-5)
        expected = reference.rms_norm(x, weight, 1e-5)
        alone, heads = x.clone(), x.repeat(1, 3)
        elementwise.rms_norm(alone.numpy(), weight.numpy(), np.float32(1e-5))
        elementwise.norm_heads(heads.numpy(), weight.numpy(), weight.numpy(), 1, 1, np.float32(1e-5))
        assert_finite_and_close(alone, expected, 1e-5)
        assert_finite_and_close(heads, torch.cat([expected, expected, x], 1), x.abs().repeat(1, 3) * 1e-5 + 1e-5)


@pytest.mark.parametrize("half", SIZES)
def test_rotation_is_right_for_extreme_values(half: int) -> None:
    torch.manual_seed(0)
    rows, head_dim = 16, 2 * half + half % 3
    qkv, angles = extremes(rows, 3 * head_dim), torch.rand(rows, half) * 6
    keys, values = torch.zeros(1, 1, rows, head_dim), torch.zeros(1, 1, rows, head_dim)
    queries, blocks, slots = torch.empty(rows, 1, head_dim), torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    tensors = (qkv, angles.cos(), angles.sin(), keys, values, blocks, slots, queries)
    elementwise.rotate_and_store(*(tensor.numpy() for tensor in tensors))
    q, k, v = qkv.view(rows, 3, head_dim).split(1, 1)
    for out, x in ((queries, q), (keys[0].transpose(0, 1), k)):
        turning = x[..., : 2 * half].abs()
        bound = torch.cat([turning + turning.roll(half, -1), x[..., 2 * half :] * 0], -1) * 3e-7 + SMALLEST
        assert_finite_and_close(out, reference.rotate(x, angles.cos(), angles.sin()), bound)
    assert torch.equal(values[0].transpose(0, 1), v)


@pytest.mark.parametrize("depth", [*SIZES, 255, 257, 513])
def test_products_are_right_for_extreme_values(depth: int) -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, depth, TILE_COLUMNS)
    weights[1] = extremes(depth, TILE_COLUMNS).clamp(-1e5, 1e5)
    for rows in SIZES:
        x, out = extremes(rows, depth), torch.full((rows, 2 * TILE_COLUMNS), torch.nan)
        float32.multiply(x.numpy(), weights.numpy(), out.numpy())
        flat = weights.double().transpose(1, 2).flatten(0, 1)
        bound = (x.double().abs() @ flat.abs().T) * 2e-6 + SMALLEST
        assert_finite_and_close(out, x.double() @ flat.T, bound)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, -0.0, 1e4, TINY])
def test_int8_products_are_right_for_extreme_values(scale: float, blocks: int) -> None:
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(-128, 128, (2, blocks * BLOCK, GROUP_LANES), dtype=np.int8))
    scales = torch.full((2, blocks, GROUP_LANES), scale)
    for rows in SIZES:
        x, out = extremes(rows, blocks * BLOCK), torch.full((rows, 2 * GROUP_LANES), torch.nan)
        int8.multiply(x.numpy(), values.numpy(), scales.numpy(), out.numpy())
        expected = reference.int8_product(x.double(), values, scales.double())
        bound = reference.int8_product(x.double().abs(), values.short().abs(), scales.double().abs()) * 2e-6
        assert_finite_and_close(out, expected, bound + SMALLEST)


@pytest.mark.parametrize("pairs", [1, 2, 129, 300])
def test_bfloat16_products_are_right_for_extreme_values(pairs: int) -> None:
    torch.manual_seed(pairs)
    weights = torch.randn(2 * TILE_COLUMNS, 2 * pairs).bfloat16()
    laid = weights.view(torch.int32).view(2, TILE_COLUMNS, pairs).transpose(1, 2).contiguous()
    for rows in SIZES:
        x, out = extremes(rows, 2 * pairs).bfloat16(), torch.full((rows, 2 * TILE_COLUMNS), torch.nan)
        inputs = x.view(torch.int32).numpy().view(np.uint32)
        bfloat16.multiply(inputs, laid.numpy().view(np.uint32), out.numpy())
        bound = x.double().abs() @ weights.double().abs().T * 2e-6
        assert_finite_and_close(out, x.double() @ weights.double().T, bound + SMALLEST)


FACTORS = (0.0, -0.0, 1.0, 88.0, -88.0, 200.0, 1e30, -1e30, TINY)  # of a head's queries
VALUES = (1.0, 1e30, TINY)  # of a key-value head's values
CONTEXTS = (1, 2, 7, 9, 16, 17, 31, 63, 65, 129, 577)
LIMITS = [(None, None), (1, None), (9, None), (9, 2.0), (None, 2.0)]  # window and softcap


class ExtremeAttention:
    """Queries with one extreme factor per head over a cache whose unused slots hold infinity and NaN.

    `kind`: of random keys, of keys that make all scores of a head of one sign, of scores up to 1e37, of scores of 0.
    """

    def __init__(self, head_dim: int, kind: str, lengths: list[int], rows: int) -> None:
        self.paged = Paged(head_dim, len(VALUES), 16, lengths)
        self.queries = torch.randn(rows, len(VALUES) * len(FACTORS), head_dim)
        if kind == "positive":
            self.paged.keys.abs_().add_(1)
            self.queries.abs_()
        self.paged.keys *= {"large": 1e6, "zero": 0.0}.get(kind, 1.0)
        self.paged.values *= torch.tensor(VALUES)[None, :, None, None]
        self.queries *= torch.tensor(FACTORS).repeat(len(VALUES))[None, :, None]

    def expected(self, rows: slice, sequence: int, start: int, limits: tuple[int | None, float | None]) -> torch.Tensor:
        """Return the reference's result, then overwrite the sequence's slots that these rows do not attend to."""
        paged, queries = self.paged, self.queries[rows]
        table, scale = paged.tables[sequence], queries.shape[2] ** -0.5
        result = reference.paged_attention(queries, paged.keys, paged.values, table, start, scale, *limits)
        places = torch.arange(len(table) * 16)
        unseen = (places >= start + len(queries)) | (places <= start - (limits[0] or start + 1))
        blocks, slots = table[places[unseen] // 16], places[unseen] % 16
        paged.keys[blocks, :, slots] = torch.inf
        paged.values[blocks, :, slots] = torch.nan
        return result

    def check(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Scores reach some thousands before the softmax has a single weight; there, their last place is 5e-4."""
        bound = torch.tensor(VALUES).repeat_interleave(len(FACTORS))[None, :, None] * 1e-3 + SMALLEST
        assert_finite_and_close(out, expected, bound)


@pytest.mark.parametrize("head_dim", [1, 3, 17, 64])
@pytest.mark.parametrize("kind", ["random", "positive", "large", "zero"])
@pytest.mark.parametrize("limits", LIMITS)
def test_decode_attention_is_right_for_extreme_values(
    limits: tuple[int | None, float | None], kind: str, head_dim: int
) -> None:
    case = ExtremeAttention(head_dim, kind, list(CONTEXTS), len(CONTEXTS))
    expected = [case.expected(slice(row, row + 1), row, context - 1, limits) for row, context in enumerate(CONTEXTS)]
    out = decode(case.paged, case.queries, list(CONTEXTS), num_threads=2, window=limits[0], softcap=limits[1])
    case.check(out, torch.cat(expected))


@pytest.mark.parametrize("head_dim", [4, 12, 36, 64])
@pytest.mark.parametrize("kind", ["random", "positive", "large", "zero"])
@pytest.mark.parametrize("limits", LIMITS)
def test_chunk_attention_is_right_for_extreme_values(
    limits: tuple[int | None, float | None], kind: str, head_dim: int
) -> None:
    spans = [(0, 2, 0), (2, 9, 1), (11, 33, 63), (44, 3, 130)]
    case = ExtremeAttention(head_dim, kind, [tokens + context for _, tokens, context in spans], 47)
    expected = [
        case.expected(slice(row, row + tokens), sequence, context, limits)
        for sequence, (row, tokens, context) in enumerate(spans)
    ]
    out = torch.full_like(case.queries, torch.nan)
    chunks(case.paged, case.queries, spans, out, window=limits[0], softcap=limits[1])
    case.check(out, torch.cat(expected))
