"""Operator of query-key norms, rotary positions and cache writes.

Source: rotary positions, Su et al. (2021), by halves as in Llama; query-key norms, Henry et al. (2020).
"""

from __future__ import annotations

import torch

from fastgen.kernels import reference
from fastgen.kernels.gpu.elementwise import rms_norm
from fastgen.kernels.gpu.operators import operator


@operator(mutates=("qkv", "key_cache", "value_cache"))
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
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    angles = cosines[positions.long()], sines[positions.long()]
    turned_queries, turned_keys = (
        reference.rotate(rms_norm(x, norm, eps).float(), *angles).to(x.dtype)
        for x, norm in ((queries, query_norm), (keys, key_norm))
    )
    queries.copy_(turned_queries)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    where = slots // block_size, slice(None), slots % block_size
    key_cache[where] = _stored(turned_keys[written], key_scale, key_cache.dtype)
    value_cache[where] = _stored(values[written], value_scale, value_cache.dtype)


def _stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        x = (x.float() * (1 / scale)).clamp(-largest, largest)
    return x.to(dtype)
