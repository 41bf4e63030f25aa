"""Bytes that the operators of `fastgen.kernels.gpu` must read and write, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Sequence


def embed_bytes(rows: int, hidden: int, element_bytes: int) -> int:
    """Return the bytes that `embed` must read and write: table rows, ids and the output."""
    return rows * hidden * 2 * element_bytes + rows * 4


def add_rms_norm_bytes(rows: int, hidden: int, element_bytes: int, *, with_update: bool, with_norm: bool) -> int:
    """Return the bytes that `add_rms_norm` must read and write.

    Args:
        rows, hidden: shape of the stream.
        element_bytes: size of one of its elements.
        with_update: whether there is an update, so that the update is read and the stream written.
        with_norm: whether the update has a norm, whose weight is read.
    """
    transfers = 4 if with_update else 2
    return rows * hidden * transfers * element_bytes + hidden * 4 * (2 if with_norm else 1)


def gated_activation_bytes(rows: int, width: int, element_bytes: int) -> int:
    """Return the bytes that `gated_activation` must read and write for an output of [rows, width]."""
    return rows * width * 3 * element_bytes


def rotary_cache_bytes(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, element_bytes: int, cache_bytes: int
) -> int:
    """Return the bytes that `rotary_cache` must read and write.

    Args:
        rows: number of tokens.
        num_heads, num_kv_heads, head_dim: of the attention.
        rotated: dimensions of a head that are rotated.
        element_bytes, cache_bytes: size of one element of `qkv` and of the cache.
    """
    queries = 2 * num_heads * head_dim * element_bytes
    keys_values = 2 * num_kv_heads * head_dim * (element_bytes + cache_bytes)
    angles = rotated * 4  # cosines and sines of half as many pairs
    return rows * (queries + keys_values + angles + 2 * 4)


def attention_bytes(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    kv_heads: int,
    heads: int,
    head_dim: int,
    element_bytes: int,
) -> int:
    """Return the bytes that one layer's attention must move in a step.

    Divide them by the time for the share of the memory bandwidth that a kernel reaches. Each key and value of the
    sequences is read once, each row's query read and its output written.

    Args:
        seq_lens: keys of each sequence, including those of its rows.
        query_lens: rows of each sequence. A sequence without rows moves nothing.
        kv_heads, heads, head_dim: of the model.
        element_bytes: bytes of an element of the cache, the query and the output.
    """
    keys = sum(length for length, rows in zip(seq_lens, query_lens, strict=True) if rows)
    return 2 * head_dim * element_bytes * (keys * kv_heads + sum(query_lens) * heads)


def route_experts_bytes(rows: int, num_experts: int, top_k: int, element_bytes: int) -> int:
    """Return the bytes that `route_experts` must read and write."""
    return rows * (num_experts * element_bytes + top_k * (element_bytes + 4))


def experts_bytes(rows: int, top_k: int, busy_experts: int, hidden: int, width: int, element_bytes: int) -> int:
    """Return the bytes that `experts` must read and write, with activations kept on the chip.

    Args:
        rows, top_k: number of tokens, and experts of each.
        busy_experts: experts that have a token; at most rows * top_k.
        hidden, width: of the model, and of one expert.
        element_bytes: size of one element of activations and weights.
    """
    weights = busy_experts * 3 * hidden * width * element_bytes
    return weights + rows * (2 * hidden * element_bytes + top_k * (element_bytes + 4))
