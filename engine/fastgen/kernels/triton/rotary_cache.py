"""Triton kernel of query-key norms, rotary positions and cache writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from fastgen.kernels.triton.variant import Variant

_ELEMENTS_OF_PROGRAM, _WARPS = 1024, 2


def rotary_cache(
    qkv: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Launch `_rotary_cache`; see `fastgen.kernels.gpu.rotary_cache.rotary_cache`."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    rows, half = len(qkv), cosines.shape[1]
    if not rows:
        return
    constants = _constants(head_dim, half)
    heads = constants["HEADS"]
    grid = (rows, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))
    _rotary_cache[grid](
        qkv, query_norm, key_norm, cosines, sines, positions, slot_mapping, key_cache, value_cache,
        num_heads, num_kv_heads, head_dim, half, block_size, *key_cache.stride()[:2], *value_cache.stride()[:2],
        eps, 1 / key_scale, 1 / value_scale, **constants, num_warps=_WARPS,
    )  # fmt: skip


def _constants(head_dim: int, half: int) -> dict[str, Any]:
    """Return the constants: as many heads in a program as make 1024 elements, 16 elements a thread."""
    head = max(16, triton.next_power_of_2(head_dim))
    return {
        "HEADS": max(1, _ELEMENTS_OF_PROGRAM // head),
        "HEAD": head,
        "HALF": triton.next_power_of_2(half),
        "IS_PARTIAL": 2 * half < head_dim,
    }


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _rotary_cache(
    qkv, query_norm, key_norm, cosines, sines, positions, slot_mapping, key_cache, value_cache,
    num_heads, num_kv_heads, head_dim, half, block_size,
    key_block_stride, key_head_stride, value_block_stride, value_head_stride,
    eps, inverse_key_scale, inverse_value_scale,
    HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Process up to HEADS heads of one row: of its queries, its keys or its values, by the second index of the grid."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(num_heads, HEADS)
    kv_tiles = tl.cdiv(num_kv_heads, HEADS)
    source = qkv + row * (num_heads + 2 * num_kv_heads) * head_dim
    slot = tl.load(slot_mapping + row).to(tl.int64)
    block, offset = slot // block_size, slot % block_size
    pairs = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + row).to(tl.int64)
    cosine = tl.load(cosines + position * half + pairs, mask=pairs < half, other=0.0)
    sine = tl.load(sines + position * half + pairs, mask=pairs < half, other=0.0)
    lanes = tl.arange(0, HEADS)[:, None]
    # Names differ between the branches because Triton merges equal ones.
    if tile < query_tiles:
        query_heads = tile * HEADS + lanes
        queries = source + query_heads * head_dim
        exists = query_heads < num_heads
        _rotate(
            queries, queries, exists, exists,
            query_norm, cosine, sine, head_dim, half, eps, 1.0, HEAD, HALF, IS_PARTIAL,
        )  # fmt: skip
    elif tile < query_tiles + kv_tiles:
        key_heads = (tile - query_tiles) * HEADS + lanes
        has_key = key_heads < num_kv_heads
        _rotate(
            source + (num_heads + key_heads) * head_dim,
            key_cache + block * key_block_stride + key_heads * key_head_stride + offset * head_dim,
            has_key, has_key & (slot >= 0),
            key_norm, cosine, sine, head_dim, half, eps, inverse_key_scale, HEAD, HALF, IS_PARTIAL,
        )  # fmt: skip
    else:
        value_heads = (tile - query_tiles - kv_tiles) * HEADS + lanes
        columns = tl.arange(0, HEAD)[None, :]
        written = (value_heads < num_kv_heads) & (columns < head_dim) & (slot >= 0)
        values = tl.load(source + (num_heads + num_kv_heads + value_heads) * head_dim + columns, mask=written)
        target = value_cache + block * value_block_stride + value_heads * value_head_stride + offset * head_dim
        _store(target + columns, values, written, inverse_value_scale)


@triton.jit
def _rotate(
    source, target, exists, written, norm, cosine, sine, head_dim, half, eps, inverse_scale,
    HEAD: tl.constexpr, HALF: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the heads at pointers source [HEADS, 1] and write them to target."""
    pairs = tl.arange(0, HALF)[None, :]
    columns = tl.arange(0, HEAD)[None, :]
    in_pairs = pairs < half
    in_rest = (columns >= 2 * half) & (columns < head_dim)  # not rotated
    first = tl.load(source + pairs, mask=exists & in_pairs, other=0.0)
    second = tl.load(source + half + pairs, mask=exists & in_pairs, other=0.0)
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    if IS_PARTIAL:
        rest = tl.load(source + columns, mask=exists & in_rest, other=0.0)
    if norm is not None:
        squares = tl.sum(a * a + b * b, 1)
        if IS_PARTIAL:
            wide = rest.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        factor = tl.rsqrt(squares / head_dim + eps)[:, None]
        a = (a * factor * tl.load(norm + pairs, mask=in_pairs, other=0.0)).to(dtype).to(tl.float32)
        b = (b * factor * tl.load(norm + half + pairs, mask=in_pairs, other=0.0)).to(dtype).to(tl.float32)
        if IS_PARTIAL:
            rest = (wide * factor * tl.load(norm + columns, mask=in_rest, other=0.0)).to(dtype)
    _store(target + pairs, (a * cosine - b * sine).to(dtype), written & in_pairs, inverse_scale)
    _store(target + half + pairs, (b * cosine + a * sine).to(dtype), written & in_pairs, inverse_scale)
    if IS_PARTIAL:
        _store(target + columns, rest, written & in_rest, inverse_scale)


@triton.jit
def _store(target, x, mask, inverse_scale):
    """Store x in the target's type; as float8_e4m3fn scaled and clamped to its range of ± 448."""
    kind: tl.constexpr = target.dtype.element_ty
    if kind == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        tl.store(target, tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(kind), mask=mask)
    else:
        tl.store(target, x.to(kind), mask=mask)


def _variants() -> Iterator[Variant]:
    """Yield all configurations in bfloat16, and those of full rotation from 64 dimensions in other types."""
    full = [(size, size // 2) for size in (16, 32, 64, 128, 256)]
    partial = [(size, half) for size in (32, 64, 128, 256) for half in (8, 16, 32, 64) if 2 * half < size]
    cases = [(size, half, "bf16", "bf16") for size, half in full + partial]
    for dtypes in (("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv")):
        cases += [(size, half, *dtypes) for size, half in full[2:]]
    norms = ("query_norm", "key_norm")
    strides = [name for name in _rotary_cache.arg_names if name.endswith("_stride")]
    for head_dim, half, dtype, cache in cases:
        signature = {
            "qkv": f"*{dtype}:16",
            **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16"),
            **dict.fromkeys(("cosines", "sines"), "*fp32:16"),
            **dict.fromkeys(("positions", "slot_mapping"), "*i32:16"),
            **dict.fromkeys(("num_heads", "num_kv_heads"), "i32"),
            **dict.fromkeys(("head_dim", "block_size", *strides), "i32:16"),
            "half": "i32:16" if half % 16 == 0 else "i32",
            **dict.fromkeys(("eps", "inverse_key_scale", "inverse_value_scale"), "fp32"),
        }
        constants = _constants(head_dim, half)
        name = f"{dtype}_cache_{cache}_{head_dim}_rotated_{2 * half}"
        # sm_80 cannot convert to float8_e4m3fn.
        targets = (90, 100, 120) if cache == "fp8e4nv" else None
        yield Variant(name, _rotary_cache, signature, constants | dict.fromkeys(norms), _WARPS, targets=targets)
        normed = signature | dict.fromkeys(norms, "*fp32:16")
        yield Variant(f"{name}_norm", _rotary_cache, normed, constants, _WARPS, targets=targets)


VARIANTS = tuple(_variants())
