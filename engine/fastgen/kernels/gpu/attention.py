"""Paged attention of a whole step: chunks and decodes in any mixture."""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.operators import register

# Programs of a launch that take ranges of the keys of decodes: about two for each multiprocessor of an H100.
SPLIT_PROGRAMS = 256


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write to `out` the causal attention of each row over the keys and values of its sequence.

    The rows of sequence s are its last `query_starts[s + 1] - query_starts[s]` tokens. On a GPU this is one launch,
    whose grid depends on shapes only, so it can be captured in a CUDA graph. Sums are float32; the weights of the
    values are rounded to the dtype of the query.

    Args:
        out: [T, heads, head_dim], dtype of the query, contiguous in the last dimension. Rows of no sequence are not
            written.
        query: [T, heads, head_dim], bfloat16, float16 or float32, contiguous in the last dimension. `heads` is a
            multiple of the KV heads, and head_dim at most 256.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], contiguous in the last two dimensions, dtype
            of the query or float8_e4m3fn. Slots beyond a sequence's length are not read.
        query_starts: int32 [S + 1], first row of each sequence and the total. Sequences without rows come last.
        seq_lens: int32 [S], keys of each sequence, including those of its rows.
        block_tables: int32 [S, M], blocks of each sequence in order. Entries beyond its length are not read.
        scale: factor of the scores.
        sinks: float32 [heads], a further score in each softmax, without a value (gpt-oss); None for none.
        workspace: float32 of `workspace_elements(...)` elements, zero before its first use, and not shared by launches
            on different streams; None not to split long decodes.
        window: number of keys that a token attends to, including its own; 0 for all.
        softcap: bound of the scores, applied by tanh (Gemma 2); 0 for none.
        key_scale, value_scale: factors of the cached keys and values.

    Raises:
        ValueError: shapes that do not fit together, or a head size without a kernel.
    """
    _, heads, head_dim = query.shape
    if out.shape != query.shape:
        raise ValueError(f"out is {tuple(out.shape)}, but the query is {tuple(query.shape)}")
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim or heads % key_cache.shape[1]:
        raise ValueError(f"a query {tuple(query.shape)} does not fit a cache {tuple(key_cache.shape)}")
    torch.ops.fastgen.paged_attention(
        out,
        query,
        key_cache,
        value_cache,
        query_starts,
        seq_lens,
        block_tables,
        sinks,
        workspace,
        scale,
        window,
        softcap,
        key_scale,
        value_scale,
    )


def workspace_elements(heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the number of float32 elements of a workspace for launches of any size with these heads.

    It holds counters of the decodes that may be split, and for each range of keys and each head head_dim sums, a
    maximum and a norm. It takes 4 bytes an element: for 32 heads over 8 KV heads of 128, 4 * 266,496 bytes, about
    1 MiB. Layers of different heads may share the largest workspace.
    """
    return SPLIT_PROGRAMS + 2 * (SPLIT_PROGRAMS // kv_heads) * heads * (head_dim + 2)


def _paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    workspace: torch.Tensor | None,  # noqa: ARG001
    scale: float,
    window: int,
    softcap: float,
    key_scale: float,
    value_scale: float,
) -> None:
    """Compute one sequence after the other, in float32."""
    group = query.shape[1] // key_cache.shape[1]
    starts = query_starts.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        table = block_tables[sequence, : -(-length // key_cache.shape[2])]
        keys = _heads_first(key_cache, table, length).repeat_interleave(group, 0) * key_scale
        values = _heads_first(value_cache, table, length).repeat_interleave(group, 0) * value_scale
        scores = torch.einsum("nhd,hkd->hnk", query[rows].float(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(length - n, length)[:, None] - torch.arange(length)  # from query back to key
        visible = (distance >= 0) & (distance < (window or length))
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, n, 1)), -1)
        weights = scores.softmax(-1)[:, :, :length]
        out[rows] = torch.einsum("hnk,hkd->nhd", weights, values).to(out.dtype)


def _heads_first(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` keys or values of a sequence as float32 [kv_heads, length, head_dim]."""
    return cache[table].float().transpose(0, 1).flatten(1, 2)[:, :length]


register(
    "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor query_starts, "
    "Tensor seq_lens, Tensor block_tables, Tensor? sinks, Tensor(b!)? workspace, float scale, int window, "
    "float softcap, float key_scale, float value_scale) -> ()",
    kernel="attention.paged_attention",
    twin=_paged_attention,
)
