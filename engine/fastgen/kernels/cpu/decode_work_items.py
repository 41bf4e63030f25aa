"""Cuts the attention of a pass's decodes into items of even size, for `decode.attend_decodes`. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

TILE = 64  # keys per softmax step of the kernel: every item begins at a multiple of it

# An item holds at least this many keys, where its context does, so that its own overhead does not count.
_SHORTEST_SPLIT = 512


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """The work of one layer's decode attention.

    Attributes:
        items: [n, 7]: row of the query, kv head, where its table begins, first and last key (exclusive), part or -1,
            and the first key that is visible: first keys are multiples of TILE, a window may begin within the tile.
        merges: [m, 4]: row, kv head, first part, number of parts.
        num_parts: results that are merged at the end.
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
        """Cuts the attention of D decodes.

        Args:
            contexts: [D], keys before and at each; decode i is row i of the pass.
            table_starts: [D], where each one's block table begins.
            num_kv_heads: heads of the cache.
            num_threads: threads that share the items.
            window: each decode sees this many keys, its own the last of them; None where it sees all.
        """
        visible = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
        origins = visible // TILE * TILE
        spans = contexts - origins
        # How a context is cut depends on nothing but itself: what is merged from other parts differs in its last bits,
        # and the same seed has to give the same tokens whatever else is in the pass.
        shares = -(-spans // np.maximum(spans // _SHORTEST_SPLIT, 1))
        # Every split but the last is a whole number of the kernel's tiles.
        lengths = -(-shares // TILE) * TILE
        splits = -(-spans // lengths)

        groups = np.repeat(np.arange(len(contexts)), num_kv_heads)  # one for each decode and head
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
    """Orders items so that an even cut into runs, one a thread, is an even share of the keys too."""
    by_size = np.argsort(items[:, 3] - items[:, 4], kind="stable")
    order = np.concatenate([by_size[thread::num_threads] for thread in range(num_threads)])
    return np.ascontiguousarray(items[order], np.int64)
