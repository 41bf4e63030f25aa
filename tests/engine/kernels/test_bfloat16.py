"""Kernels on bfloat16 activations and caches, compared with float32 references on the same rounded inputs.

They compute in float32 and round at the end, so a result is the reference rounded to bfloat16, or its neighbour where
the reference lies between two.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu import bfloat16, elementwise  # noqa: F401  (importing bfloat16 compiles its kernels)
from fastgen.model.layers.linear import as_array
from support.paged_attention import Paged, chunks, decode

ULP = 2.0**-7  # of bfloat16, at most, relative to the value
EPSILON = np.float32(1e-5)


def rounded(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def assert_rounded(out: torch.Tensor, expected: torch.Tensor, noise: float = 2e-6) -> None:
    """Assert that nearly all of `out` is `expected` rounded, and the rest a neighbour; `noise` is the reference's."""
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=ULP / 2, atol=noise)
    certain = expected.abs() > 1e4 * noise
    assert certain.sum() >= 40
    assert (out == expected.bfloat16())[certain].float().mean() > 0.95


def test_rounding_is_to_nearest_even_and_keeps_infinity_nan_and_signs() -> None:
    """Keys of 1 that are rotated with cosines `values` and sines of 0 are stored as `values`."""
    tie_down, tie_up, above = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20
    values = torch.tensor([tie_down, tie_up, above, -tie_down, 1e-40, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38])
    qkv, queries = torch.zeros(1, 30, dtype=torch.bfloat16), torch.empty(1, 1, 10)
    keys, stored = (torch.zeros(1, 1, 1, 10, dtype=torch.bfloat16) for _ in range(2))
    qkv[0, 10:20] = 1
    sines, place = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)
    for cosines in (values[None, :5], values[None, 5:]):
        tensors = (cosines.contiguous(), sines)
        elementwise.rotate_and_store(
            as_array(qkv), *(tensor.numpy() for tensor in tensors), as_array(keys), as_array(stored), place.numpy(),
            place.numpy(), queries.numpy(),
        )  # fmt: skip
        expected = cosines[0].bfloat16()
        for half in (keys[0, 0, 0, :5], keys[0, 0, 0, 5:]):
            assert np.array_equal(half.float(), expected.float(), equal_nan=True)
    assert torch.equal(keys[0, 0, 0, 0].signbit(), torch.tensor(True)), "-0.0"


@pytest.mark.parametrize("hidden", [17, 64, 576])
def test_norms_add_in_float32_and_round_only_their_output(hidden: int) -> None:
    torch.manual_seed(hidden)
    stream, update, weight = torch.randn(9, hidden), rounded(9, hidden), torch.rand(hidden) + 0.5
    total, normed = reference.add_rms_norm(stream, update.float(), weight, float(EPSILON))
    out = torch.empty(9, hidden, dtype=torch.bfloat16)
    elementwise.add_rms_norm(stream.numpy(), as_array(update), weight.numpy(), EPSILON, as_array(out))
    assert torch.equal(stream, total), "the residual stream is not rounded"
    assert_rounded(out, normed)

    expected = reference.rms_norm(update.float(), weight, float(EPSILON))
    elementwise.rms_norm(as_array(update), weight.numpy(), EPSILON)
    assert_rounded(update, expected)

    heads = rounded(9, 4 * hidden)
    before = heads.clone().view(9, 4, hidden)
    expected = reference.rms_norm(before[:, :3].float(), weight, float(EPSILON))
    elementwise.norm_heads(as_array(heads), weight.numpy(), weight.numpy(), 2, 1, EPSILON)
    assert_rounded(heads.view(9, 4, hidden)[:, :3].contiguous(), expected)
    assert torch.equal(heads.view(9, 4, hidden)[:, 3], before[:, 3])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turning"), [(9, 3, 64, 64), (4, 2, 32, 24)])
def test_rotation_rounds_keys_but_not_queries(heads: int, kv_heads: int, head_dim: int, turning: int) -> None:
    torch.manual_seed(0)
    rows, block_size = 11, 16
    qkv, angles = rounded(rows, (heads + 2 * kv_heads) * head_dim), torch.rand(rows, turning // 2) * 6
    places = torch.randperm(4 * block_size)[:rows]
    blocks, slots = places // block_size, places % block_size
    keys = torch.full((4, kv_heads, block_size, head_dim), 9.0, dtype=torch.bfloat16)
    values, queries = keys.clone(), torch.empty(rows, heads, head_dim)
    angular = angles.cos(), angles.sin()
    elementwise.rotate_and_store(
        as_array(qkv), *(part.numpy() for part in angular), as_array(keys), as_array(values), blocks.numpy(),
        slots.numpy(), queries.numpy(),
    )  # fmt: skip
    q, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    torch.testing.assert_close(queries, reference.rotate(q.float(), *angular), atol=1e-6, rtol=0)
    assert_rounded(keys[blocks, :, slots], reference.rotate(k.float(), *angular))
    assert torch.equal(values[blocks, :, slots], v)
    keys[blocks, :, slots] = 9.0
    assert (keys == 9).all()


@pytest.mark.parametrize("name", ["silu_multiply", "gelu_tanh_multiply", "clamped_swiglu_multiply"])
@pytest.mark.parametrize("width", [5, 64, 83])
def test_gates_are_computed_in_float32(name: str, width: int) -> None:
    torch.manual_seed(width)
    gate_up, out = rounded(50, 2 * width, scale=3.0), torch.empty(50, width, dtype=torch.bfloat16)
    getattr(elementwise, name)(as_array(gate_up), as_array(out))
    assert_rounded(out, getattr(reference, name)(gate_up.float()), noise=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 2.0)])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "block_size"), [(64, 3, 3, 64), (20, 2, 4, 16)])
def test_attention_reads_a_rounded_cache_and_sums_in_float32(
    head_dim: int, kv_heads: int, group: int, block_size: int, window: int | None, softcap: float | None
) -> None:
    contexts, spans = [1, 17, 65, 200, 1300], [(0, 2, 0), (2, 33, 63), (35, 3, 130), (38, 70, 0)]
    lengths = [*contexts, *(tokens + context for _, tokens, context in spans)]
    paged = Paged(head_dim, kv_heads, block_size, lengths)
    paged.round()
    wide = paged.keys.float(), paged.values.float()
    scale, limits = head_dim**-0.5, (window, softcap)
    rows = sum(tokens for _, tokens, _ in spans)
    queries = torch.randn(rows, kv_heads * group, head_dim) * 2
    # What no row may attend to is infinite or not a number.
    for table, length in zip(paged.tables, lengths, strict=True):
        unused = torch.arange(length, len(table) * block_size)
        paged.keys[table[unused // block_size], :, unused % block_size] = torch.inf
        paged.values[table[unused // block_size], :, unused % block_size] = torch.nan

    few = queries[: len(contexts)].contiguous()
    out = decode(paged, few, contexts, num_threads=2, window=window, softcap=softcap)
    expected = [
        reference.paged_attention(few[row : row + 1], *wide, paged.tables[row], context - 1, scale, *limits)
        for row, context in enumerate(contexts)
    ]
    assert_rounded(out, torch.cat(expected), noise=1e-5)

    later = Paged.__new__(Paged)
    later.keys, later.values, later.tables = paged.keys, paged.values, paged.tables[len(contexts) :]
    out = torch.full(queries.shape, torch.nan, dtype=torch.bfloat16)
    chunks(later, queries, spans, out, window=window, softcap=softcap)
    expected = [
        reference.paged_attention(queries[row : row + tokens], *wide, table, context, scale, *limits)
        for (row, tokens, context), table in zip(spans, later.tables, strict=True)
    ]
    assert_rounded(out, torch.cat(expected), noise=1e-5)
