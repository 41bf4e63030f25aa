"""The element-wise kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu import elementwise


@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (3, 7), (65, 128)])
def test_add_and_norm_equals_the_reference(rows: int, hidden: int) -> None:
    torch.manual_seed(0)
    x, update, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.rand(hidden)
    total, normed = reference.add_rms_norm(x, update, weight, 1e-5)
    out = torch.empty_like(x)
    elementwise.add_rms_norm(x.numpy(), update.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())
    assert torch.equal(x, total)
    torch.testing.assert_close(out, normed, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 9), (70, 64)])
@pytest.mark.parametrize("name", ["silu_multiply", "gelu_tanh_multiply", "clamped_swiglu_multiply"])
def test_gates_equal_the_reference_in_both_tails(name: str, rows: int, width: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * width) * 10
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    out = torch.empty(rows, width)
    getattr(elementwise, name)(gate_up.numpy(), out.numpy())
    torch.testing.assert_close(out, getattr(reference, name)(gate_up), atol=5e-6, rtol=2e-6)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (3, 7), (65, 128)])
def test_the_norm_in_place_equals_the_reference(rows: int, hidden: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden), torch.rand(hidden)
    expected = reference.rms_norm(x, weight, 1e-5)
    elementwise.rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5))
    torch.testing.assert_close(x, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 16), (2, 2, 6)])
def test_the_norm_of_heads_does_not_change_values(heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    qkv, query_norm, key_norm = (
        torch.randn(5, heads + 2 * kv_heads, head_dim),
        torch.rand(head_dim),
        torch.rand(head_dim),
    )
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    expected = torch.cat([reference.rms_norm(q, query_norm, 1e-6), reference.rms_norm(k, key_norm, 1e-6), v], 1)
    flat = qkv.flatten(1)
    elementwise.norm_heads(flat.numpy(), query_norm.numpy(), key_norm.numpy(), heads, kv_heads, np.float32(1e-6))
    torch.testing.assert_close(flat.view_as(expected), expected, atol=2e-6, rtol=2e-6)


def test_the_norm_of_all_heads_together_has_the_width_of_queries_or_keys() -> None:
    torch.manual_seed(0)
    qkv, query_norm, key_norm = torch.randn(5, 8 * 6), torch.rand(4 * 6), torch.rand(2 * 6)
    q, k, v = qkv.split([24, 12, 12], 1)
    expected = torch.cat([reference.rms_norm(q, query_norm, 1e-6), reference.rms_norm(k, key_norm, 1e-6), v], 1)
    elementwise.norm_heads(qkv.numpy(), query_norm.numpy(), key_norm.numpy(), 1, 1, np.float32(1e-6))
    torch.testing.assert_close(qkv, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turning", "block_size"),
    [(9, 3, 64, 64, 64), (4, 1, 16, 16, 32), (2, 2, 128, 128, 16), (4, 2, 32, 24, 16)],
)
def test_rotation_stores_each_row_only_in_its_slot(
    heads: int, kv_heads: int, head_dim: int, turning: int, block_size: int
) -> None:
    torch.manual_seed(0)
    rows, num_blocks = 11, 4
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(rows, turning // 2) * 6
    places = torch.randperm(num_blocks * block_size)[:rows]
    blocks, slots = places // block_size, places % block_size
    keys = torch.full((num_blocks, kv_heads, block_size, head_dim), 9.0)
    values = keys.clone()
    queries = torch.empty(rows, heads, head_dim)
    elementwise.rotate_and_store(
        qkv.numpy(),
        angles.cos().numpy(),
        angles.sin().numpy(),
        keys.numpy(),
        values.numpy(),
        blocks.numpy(),
        slots.numpy(),
        queries.numpy(),
    )
    q, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    torch.testing.assert_close(queries, reference.rotate(q, angles.cos(), angles.sin()), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        keys[blocks, :, slots], reference.rotate(k, angles.cos(), angles.sin()), atol=1e-6, rtol=0
    )
    assert torch.equal(values[blocks, :, slots], v)
    keys[blocks, :, slots] = 9.0
    values[blocks, :, slots] = 9.0
    assert (keys == 9).all()
    assert (values == 9).all()
