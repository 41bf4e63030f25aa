"""Split the attention of decodes into work items of similar size, for `decode_attention`. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

TILE = 64  # keys per softmax step of the kernel; items begin at multiples of it

# Minimum keys per item, if the context has as many, so that its overhead is negligible.
_SHORTEST_SPLIT = 512


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """The work items of one layer's decode attention.

    Attributes:
        items: [n, 7]: row of the query, kv head, start of its block table, first and last key (exclusive), part or -1,
            and first visible key. First keys are multiples of TILE; a window may begin within a tile.
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
        spans = contexts - origins
        # The split of a context must not depend on other sequences: merging other parts changes the last bits, and the
        # same seed must give the same tokens in every batch.
        shares = -(-spans // np.maximum(spans // _SHORTEST_SPLIT, 1))
        # All parts but the last consist of whole tiles.
        lengths = -(-shares // TILE) * TILE
        splits = -(-spans // lengths)

        groups = np.repeat(np.arange(len(contexts)), num_kv_heads)  # one per decode and head
        heads = np.tile(np.arange(num_kv_heads), len(contexts))
        group_splits = splits[groups]
        of_group = np.repeat(np.arange(len(groups)), group_splits)
        first_items = np.cumsum(group_splits) - group_splits
        index = np.arange(len(of_group)) - first_items[of_group]

        rows = groups[of_group]
        begins = origins[rows] + index * lengths[rows]
        ends = np.minimum(begins + lengths[rows], contexts[rows])
        is_part = group_splits[of_group] > 1
        parts = np.where(is_part, np.cumsum(is_part) - 1, -1)
        items = np.stack([rows, heads[of_group], table_starts[rows], begins, ends, parts, visible[rows]], axis=1)

        split_groups = np.flatnonzero(group_splits > 1)
        counts = group_splits[split_groups]
        merges = np.stack([groups[split_groups], heads[split_groups], np.cumsum(counts) - counts, counts], axis=1)
        return cls(_dealt(items, num_threads), np.ascontiguousarray(merges, np.int64), int(is_part.sum()))


def _dealt(items: IntArray, num_threads: int) -> IntArray:
    """Order items so that equal runs of items, one per thread, have about equal numbers of keys."""
    by_size = np.argsort(items[:, 3] - items[:, 4], kind="stable")
    order = np.concatenate([by_size[thread::num_threads] for thread in range(num_threads)])
    return np.ascontiguousarray(items[order], np.int64)
