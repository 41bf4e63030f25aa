"""Split the attention of a step into work items of similar size, for the kernels beside it. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

TILE = 64  # keys per softmax step; the items of the decode kernel begin at multiples of it

# Contexts are split at multiples of it: in decodes and chunks alike, because other parts would change the last bits of
# the merged result. It is long enough to make the overhead of a work item negligible.
PART = 512
_NO_WINDOW = 1 << 40  # longer than any context


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """The work items of one layer's decode attention.

    Attributes:
        items: [n, 7]: row of the query, kv head, start of its block table, first and last key (exclusive), part or -1,
            and first visible key. First keys are multiples of TILE, and of PART except for the first part; a window may
            begin within a tile.
        merges: [m, 4]: row, kv head, first part, number of parts.
        num_parts: number of partial results that are merged at the end.
    """

    items: IntArray
    merges: IntArray
    num_parts: int

    @classmethod
    def cut(
        cls,
        contexts: IntArray,
        table_starts: IntArray,
        *,
        num_kv_heads: int,
        num_threads: int,
        window: int | None = None,
    ) -> DecodeItems:
        """Split the attention of D decodes.

        Args:
            contexts: [D], number of keys of each decode, including its own; decode i is row i of the step.
            table_starts: [D], start of each block table.
            num_kv_heads: heads of the cache.
            num_threads: threads that share the items.
            window: number of keys that each decode attends to, including its own; None for all.
        """
        visible = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
        origins = visible // TILE * TILE
        first_parts = origins // PART
        splits = -(-contexts // PART) - first_parts

        groups = np.repeat(np.arange(len(contexts)), num_kv_heads)  # one per decode and head
        heads = np.tile(np.arange(num_kv_heads), len(contexts))
        group_splits = splits[groups]
        of_group = np.repeat(np.arange(len(groups)), group_splits)
        rows, index = groups[of_group], _index_in_run(group_splits)

        starts = (first_parts[rows] + index) * PART
        begins, ends = np.maximum(starts, origins[rows]), np.minimum(starts + PART, contexts[rows])
        is_part = group_splits[of_group] > 1
        parts = np.where(is_part, np.cumsum(is_part) - 1, -1)
        items = np.stack([rows, heads[of_group], table_starts[rows], begins, ends, parts, visible[rows]], axis=1)

        split_groups = np.flatnonzero(group_splits > 1)
        counts = group_splits[split_groups]
        merges = np.stack([groups[split_groups], heads[split_groups], np.cumsum(counts) - counts, counts], axis=1)
        items = _dealt(items, ends - begins, num_threads)
        return cls(items, np.ascontiguousarray(merges, np.int64), int(is_part.sum()))


def cut_chunks(
    chunks: IntArray, *, lanes: int, num_kv_heads: int, group: int, num_threads: int, window: int | None = None
) -> IntArray:
    """Split the attention of C prompt chunks.

    Args:
        chunks: [C, 4]: first row, number of tokens, computed tokens before the chunk, and start of the block table.
        lanes: queries per item.
        num_kv_heads: heads of the cache.
        group: query heads per kv head.
        num_threads: threads that share the items.
        window: number of keys that each token attends to, including its own; None for all.

    Returns:
        [n, 7]: the columns of `chunks`, kv head, first query (number of the token in the chunk times `group`, plus the
        number of the query head in its group), and window.
    """
    counts = -(-chunks[:, 1] * group // lanes)
    owner = np.repeat(np.arange(len(chunks)), counts)
    by_head = np.empty((len(owner), num_kv_heads, 7), np.int64)
    by_head[:, :, :4] = chunks[owner, None]
    by_head[:, :, 4] = np.arange(num_kv_heads)
    by_head[:, :, 5] = (_index_in_run(counts) * lanes)[:, None]
    by_head[:, :, 6] = window or _NO_WINDOW
    items = by_head.reshape(-1, 7)
    return _dealt(items, np.minimum(items[:, 2] + items[:, 5] // group, items[:, 6]), num_threads)


def _index_in_run(lengths: IntArray) -> IntArray:
    """Return 0, 1, ... for each run of the given lengths, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _dealt(items: IntArray, num_keys: IntArray, num_threads: int) -> IntArray:
    """Order items so that equal runs of items, one per thread, have about equal numbers of keys."""
    by_size = np.argsort(-num_keys, kind="stable")
    order = np.concatenate([by_size[thread::num_threads] for thread in range(num_threads)])
    return np.ascontiguousarray(items[order], np.int64)
