"""Paged attention of a whole step: chunks and decodes in any mixture."""

from __future__ import annotations

import torch

from fastgen.kernels import reference
from fastgen.kernels.gpu.operators import operator

# Largest dimension of a head for which there are kernels.
MAX_HEAD_DIM = 256


@operator(mutates=("out", "workspace"))
def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,  # noqa: ARG001
    workspace: torch.Tensor,  # noqa: ARG001
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write to `out` the causal attention of each row over the keys and values of its sequence.

    The rows of sequence s are its last `query_starts[s + 1] - query_starts[s]` tokens. On a GPU this is one launch, or
    one for decodes and one for chunks, whose grids depend on shapes only, so they can be captured in a CUDA graph. Sums
    are float32; the weights of the values are rounded to the dtype of the query.

    Args:
        out: [T, heads, head_dim], dtype of the query, contiguous in the last dimension. Rows of no sequence are not
            written.
        query: [T, heads, head_dim], bfloat16, float16 or float32, contiguous in the last dimension. `heads` is a
            multiple of the KV heads, and head_dim at most 256.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], contiguous in the last two dimensions, dtype
            of the query or float8_e4m3fn. Slots beyond a sequence's length are not read.
        query_starts: int32 [S + 1], first row of each sequence and the total.
        seq_lens: int32 [S], keys of each sequence, including those of its rows.
        block_tables: int32 [S, M], blocks of each sequence in order. Entries beyond its length are not read.
        work: what `list_attention_work` returned for this query, cache, `query_starts`, `seq_lens` and window.
        workspace: float32 of `workspace_elements(...)` elements, zero before its first use, and not shared by launches
            on different streams.
        scale: factor of the scores.
        sinks: float32 [heads], an additional score in each softmax, without a value (gpt-oss); None for none.
        window: number of keys that a token attends to, including its own; 0 for all.
        softcap: bound of the scores, applied by tanh (Gemma 2); 0 for none.
        key_scale, value_scale: factors of the cached keys and values.

    Raises:
        ValueError: if the query does not fit the output or the cache; on a GPU also if there is no kernel for its
            heads, the work list is of another step or the workspace is too small.
    """
    check_shapes(out, query, key_cache, value_cache)
    starts = query_starts.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        n = rows.stop - rows.start
        if n:
            table = block_tables[sequence, : -(-length // key_cache.shape[2])]
            attended = reference.paged_attention(
                query[rows].float(), key_cache, value_cache, table, length - n, scale * key_scale,
                window=window or None, softcap=softcap or None, sinks=sinks,
            )  # fmt: skip
            out[rows] = (attended * value_scale).to(out.dtype)


def check_shapes(out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise a ValueError if arguments of `paged_attention` do not fit together."""
    if out.shape != query.shape:
        raise ValueError(f"out is {tuple(out.shape)}, but the query is {tuple(query.shape)}")
    _, kv_heads, _, head_dim = key_cache.shape
    if key_cache.shape != value_cache.shape or head_dim != query.shape[2] or query.shape[1] % kv_heads:
        raise ValueError(f"a query {tuple(query.shape)} does not fit a cache {tuple(key_cache.shape)}")
