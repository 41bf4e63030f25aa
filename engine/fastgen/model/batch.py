"""A pass as flat arrays, made once and used by every layer.

The rows of a pass are its tokens: those of chunks of one token first (one row each), then longer chunks one after
another. No padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from fastgen.core.scheduler import Chunk, Pass

IntArray = npt.NDArray[np.int64]

# An item of decode attention holds at least this many keys, so that its own overhead does not count.
_SHORTEST_SPLIT = 512
# Items each thread should have to choose from, so that all end at about the same time.
_ITEMS_PER_THREAD = 6


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk of several tokens: its rows, the tokens of its sequence before it, and its blocks in order."""

    row: int
    num_tokens: int
    context: int
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """The arrays of one pass with T rows, D of them decodes and S sampled.

    Attributes:
        token_ids: [T].
        positions: [T], in its sequence.
        blocks, slots: [T], where each row's key and value go.
        sample_rows: [S], rows whose logits are wanted, in the order of the chunks.
        tables: block tables of all sequences, one after another.
        items, merges, num_parts: the work of decode attention, see `fastgen.kernels.decode`.
        chunks: chunks of several tokens.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    slots: IntArray
    sample_rows: IntArray
    tables: IntArray
    items: IntArray
    merges: IntArray
    num_parts: int
    chunks: tuple[ChunkSpan, ...]

    @property
    def num_rows(self) -> int:
        """Forward tokens of the pass."""
        return len(self.token_ids)

    @classmethod
    def from_pass(cls, pass_: Pass, *, block_size: int, num_kv_heads: int, num_threads: int) -> Batch:
        """Flattens a pass. `num_threads`: what decode attention will run on."""
        chunks = pass_.chunks
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        first_rows = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(chunks)), counts)
        positions = starts[owner] + np.arange(len(owner)) - first_rows[owner]
        table_sizes = np.array([len(chunk.sequence.block_table) for chunk in chunks], np.int64)
        table_starts = np.cumsum(table_sizes) - table_sizes
        tables = np.fromiter(chain.from_iterable(chunk.sequence.block_table for chunk in chunks), np.int64)
        num_decodes = int(np.searchsorted(counts > 1, True))
        assert (counts[num_decodes:] > 1).all(), "chunks of one token come first"
        items, merges, num_parts = decode_items(
            starts[:num_decodes] + 1, table_starts[:num_decodes], num_kv_heads=num_kv_heads, num_threads=num_threads
        )
        return cls(
            token_ids=np.fromiter(chain.from_iterable(map(_tokens, chunks)), np.int64, len(owner)),
            positions=positions,
            blocks=tables[table_starts[owner] + positions // block_size],
            slots=positions % block_size,
            sample_rows=np.array(
                [row for row, chunk in zip((first_rows + counts - 1).tolist(), chunks, strict=True) if chunk.samples],
                np.int64,
            ),
            tables=tables,
            items=items,
            merges=merges,
            num_parts=num_parts,
            chunks=tuple(
                ChunkSpan(
                    row=int(first_rows[i]),
                    num_tokens=int(counts[i]),
                    context=int(starts[i]),
                    blocks=tables[table_starts[i] :][: -(-int(starts[i] + counts[i]) // block_size)],
                )
                for i in range(num_decodes, len(chunks))
            ),
        )


def _tokens(chunk: Chunk) -> list[int]:
    return chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]


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
        items [n, 6] and merges [m, 4] as `fastgen.kernels.decode` wants them, and the number of parts.
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
