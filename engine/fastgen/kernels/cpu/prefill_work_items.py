"""Cuts the attention of a pass's prompt chunks into items of one size, for `chunk.attend_chunks`. Pure arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_NO_WINDOW = 1 << 40  # longer than any context


def cut(
    chunks: IntArray, *, lanes: int, num_kv_heads: int, group: int, num_threads: int, window: int | None = None
) -> IntArray:
    """Cuts the attention of C chunks.

    Args:
        chunks: [C, 4]: a chunk's first row, its tokens, the tokens of its sequence before it, and where its block table
            begins.
        lanes: queries of an item.
        num_kv_heads: heads of the cache.
        group: query heads for each of them.
        num_threads: threads that share the items.
        window: each token sees this many, itself the last of them; None where it sees all.

    Returns:
        [n, 7]: what `chunks` says of it, kv head, first of its queries (tokens times `group`), and the window. Ordered
        so that an even cut into runs, one a thread, is an even share of the keys too.
    """
    counts = -(-chunks[:, 1] * group // lanes)
    owner = np.repeat(np.arange(len(chunks)), counts)
    first_items = np.cumsum(counts) - counts
    firsts = (np.arange(len(owner)) - first_items[owner]) * lanes
    by_head = np.empty((len(owner), num_kv_heads, 7), np.int64)
    by_head[:, :, :4] = chunks[owner, None]
    by_head[:, :, 4] = np.arange(num_kv_heads)
    by_head[:, :, 5] = firsts[:, None]
    by_head[:, :, 6] = window or _NO_WINDOW
    items = by_head.reshape(-1, 7)
    seen = np.minimum(items[:, 2] + items[:, 5] // group, items[:, 6])
    by_size = np.argsort(-seen, kind="stable")
    return np.ascontiguousarray(items[np.concatenate([by_size[thread::num_threads] for thread in range(num_threads)])])
