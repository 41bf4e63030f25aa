"""Operator of query-key norms, rotary positions and cache writes.

Source: rotary positions, Su et al. (2021), by halves as in Llama; query-key norms, Henry et al. (2020).
"""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.elementwise import rms_norm
from fastgen.kernels.gpu.operators import register

_FLOAT8_MAX = 448.0  # of float8_e4m3fn


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
    """Normalise and rotate queries and keys, and write keys and values to the cache, in one launch.

    Queries are changed in place. Keys and values in `qkv` stay as they were: attention reads them from the cache.

    Args:
        qkv: [T, (heads + 2 * kv heads) * head_dim], contiguous; bfloat16, float16 or float32.
        query_norm, key_norm: [head_dim] float32, weights of the norms over each head; both or none.
        cosines, sines: [max positions, d / 2] float32, contiguous; the first d dimensions of a head are rotated.
        positions: [T] int32, each below max positions.
        slot_mapping: [T] int32, block * block size + offset; -1: the row's keys and values are not written.
        key_cache, value_cache: [blocks, kv heads, block size, head_dim] with any strides of blocks and heads,
            contiguous in the last two dimensions; qkv's dtype, or float8_e4m3fn (compute capability 8.9 or higher).
        num_heads: number of query heads.
        eps: added to the mean squares.
        key_scale, value_scale: of a float8 cache, which holds key / key_scale and value / value_scale, clamped to
            ± 448.

    Norms and rotations are computed in float32, and each is rounded to qkv's dtype.
    """
    torch.ops.fastgen.rotary_cache(
        qkv,
        query_norm,
        key_norm,
        cosines,
        sines,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        num_heads,
        eps,
        key_scale,
        value_scale,
    )


def _rotary_cache_twin(
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
    key_scale: float,
    value_scale: float,
) -> None:
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    cosines, sines = cosines[positions.long(), None], sines[positions.long(), None]  # [T, 1, d / 2]
    rotated_keys = _rotated(keys if key_norm is None else rms_norm(keys, key_norm, eps), cosines, sines)
    queries.copy_(_rotated(queries if query_norm is None else rms_norm(queries, query_norm, eps), cosines, sines))
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    where = slots // block_size, slice(None), slots % block_size
    key_cache[where] = _stored(rotated_keys[written], key_scale, key_cache.dtype)
    value_cache[where] = _stored(values[written], value_scale, value_cache.dtype)


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the first d dimensions of x [T, heads, head_dim] in float32."""
    half = cosines.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1)


def _stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return (x.float() * (1 / scale)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(dtype)
    return x.to(dtype)


register(
    "rotary_cache(Tensor(a!) qkv, Tensor? query_norm, Tensor? key_norm, Tensor cosines, Tensor sines, "
    "Tensor positions, Tensor slot_mapping, Tensor(b!) key_cache, Tensor(c!) value_cache, int num_heads, float eps, "
    "float key_scale, float value_scale) -> ()",
    kernel="rotary_cache.rotary_cache",
    twin=_rotary_cache_twin,
)
