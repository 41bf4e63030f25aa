"""Split the attention of prompt chunks into work items of equal size, for `prefill_attention`. Pure arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_NO_WINDOW = 1 << 40  # longer than any context


def cut(
    chunks: IntArray, *, lanes: int, num_kv_heads: int, group: int, num_threads: int, window: int | None = None
) -> IntArray:
    """Split the attention of C chunks.

    Args:
        chunks: [C, 4]: first row, number of tokens, computed tokens before the chunk, and start of the block table.
        lanes: queries per item.
        num_kv_heads: heads of the cache.
        group: query heads per kv head.
        num_threads: threads that share the items.
        window: number of keys that each token attends to, including its own; None for all.

    Returns:
        [n, 7]: the columns of `chunks`, kv head, first query (tokens times `group`), and window. Ordered so that equal
        runs of items, one per thread, have about equal numbers of keys.
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
