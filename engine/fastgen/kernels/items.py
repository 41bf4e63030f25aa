"""The work of decode attention, cut into items of even size for `fastgen.kernels.decode`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# An item of decode attention holds at least this many keys, so that its own overhead does not count.
_SHORTEST_SPLIT = 512
# Items each thread should have to choose from, so that all end at about the same time.
_ITEMS_PER_THREAD = 6


def decode_items(
    contexts: IntArray, table_starts: IntArray, *, num_kv_heads: int, num_threads: int
) -> tuple[IntArray, IntArray, int]:
    """Cuts the attention of D decodes into items of even size.

    Args:
        contexts: [D], keys that each sees, its own among them; decode i is row i of the pass.
        table_starts: [D], where each one's block table begins.
        num_kv_heads: heads of the cache.
        num_threads: threads that share the items.

    Returns:
        items [n, 6] and merges [m, 4] as `fastgen.kernels.decode.attend_decodes` wants them, and the number of parts.
    """
    even_share = int(contexts.sum()) * num_kv_heads // (num_threads * _ITEMS_PER_THREAD)
    longest = max(_SHORTEST_SPLIT, -(-even_share // 64) * 64)
    splits = -(-contexts // longest)
    # Every split but the last is a whole number of the kernel's tiles of 64 keys.
    shares = -(-contexts // splits)
    lengths = -(-shares // 64) * 64

    groups = np.repeat(np.arange(len(contexts)), num_kv_heads)  # one for each decode and head
    heads = np.tile(np.arange(num_kv_heads), len(contexts))
    group_splits = splits[groups]
    of_group = np.repeat(np.arange(len(groups)), group_splits)
    first_items = np.cumsum(group_splits) - group_splits
    index = np.arange(len(of_group)) - first_items[of_group]

    rows = groups[of_group]
    begins = index * lengths[rows]
    ends = np.minimum(begins + lengths[rows], contexts[rows])
    is_part = group_splits[of_group] > 1
    parts = np.where(is_part, np.cumsum(is_part) - 1, -1)
    items = np.stack([rows, heads[of_group], table_starts[rows], begins, ends, parts], axis=1)

    split_groups = np.flatnonzero(group_splits > 1)
    counts = group_splits[split_groups]
    merges = np.stack([groups[split_groups], heads[split_groups], np.cumsum(counts) - counts, counts], axis=1)
    return _dealt(items, num_threads), np.ascontiguousarray(merges, np.int64), int(is_part.sum())


def _dealt(items: IntArray, num_threads: int) -> IntArray:
    """Orders items so that an even cut into runs, one a thread, is an even share of the keys too."""
    by_size = np.argsort(items[:, 3] - items[:, 4], kind="stable")
    order = np.concatenate([by_size[thread::num_threads] for thread in range(num_threads)])
    return np.ascontiguousarray(items[order], np.int64)
