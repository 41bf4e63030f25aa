"""The pool of KV cache blocks.

PagedAttention (Kwon et al., 2023): the KV of a sequence lies in fixed-size blocks anywhere in the cache, listed in
order by its block table. Nothing is reserved ahead of need, so only the unused slots of the last block are wasted. Full
blocks are never written again, so sequences with the same prefix can share them.
"""

from __future__ import annotations

from collections import Counter, abc

from fastgen.core.blocks.prefix_cache import BlockKey, PrefixCache
from fastgen.core.blocks.state_pool import StatePool
from fastgen.core.blocks.window_pool import WindowGroup, WindowPool


class BlockPool:
    """Allocates blocks `0 .. num_blocks - 1` and counts the references to them.

    A block is either referenced by one or more sequences, or unreferenced in the prefix cache (reusable and evictable),
    or free.

    Attributes:
        states: slots for the recurrent states of sequences, and snapshots of them after cached blocks.
        window: blocks of the layers with a sliding window; None if all layers have the same blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_state_slots: int = 0, window_group: WindowGroup | None = None
    ) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = StatePool(num_state_slots)
        self.window = None if window_group is None else WindowPool(window_group, block_size)
        # A stack: the block freed last is the most likely to be in a CPU cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._prefix_cache = PrefixCache()

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free and evictable ones."""
        return len(self._free) + self._prefix_cache.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_shared(self, table: list[int]) -> int:
        """Return how many blocks of `table` are referenced by other sequences too."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block] > 1 for block in table)

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Append blocks to `table` until it has room for `num_tokens` tokens.

        The caller has checked that there are enough. Takes free blocks first, then evicts the least recently used ones
        of the prefix cache.
        """
        missing = self.blocks_for(num_tokens) - len(table)
        assert missing <= self.num_free, f"{missing} blocks needed, {self.num_free} free"
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict_cached()
            self._ref_counts[block] = 1
            table.append(block)

    def release(self, table: list[int]) -> None:
        """Drop the references to all blocks of `table`, and clear it."""
        for block in reversed(table):  # children before their parents, see `fastgen.core.blocks.prefix_cache`
            self._unref(block)
        table.clear()

    def key(self, table: list[int], tokens: list[int], salt: str, index: int) -> BlockKey:
        """Return the prefix cache key of block `index`; `table` holds the blocks before it."""
        start = index * self.block_size
        return (table[index - 1] if index else salt, tuple(tokens[start : start + self.block_size]))

    def match(self, tokens: list[int], salt: str, num_blocks: int) -> list[int]:
        """Return the cached blocks of the longest prefix of `tokens`, with a reference to each.

        They are at most `num_blocks`.
        """
        table: list[int] = []
        for index in range(num_blocks):
            block = self._prefix_cache.find(self.key(table, tokens, salt, index))
            if block is None:
                break
            self._ref(block)
            table.append(block)
        return table

    def publish(
        self, table: list[int], tokens: list[int], salt: str, num_published: int, num_full: int
    ) -> dict[int, int]:
        """Add blocks `num_published` to `num_full - 1` of `table`, which are full, to the prefix cache.

        Where the cache has an equal block already, that block replaces the sequence's own in `table`. Returns the
        replaced blocks by their index in `table`. They keep their references until the caller releases them: steps in
        flight may still read them.
        """
        replaced: dict[int, int] = {}
        for index in range(num_published, num_full):
            key, own = self.key(table, tokens, salt, index), table[index]
            cached = self._prefix_cache.find(key)
            if cached is None:
                self._prefix_cache.add(key, own)
            else:
                self._ref(cached)
                table[index], replaced[index] = cached, own
        return replaced

    def check_integrity(
        self,
        tables: abc.Sequence[list[int]],
        state_slots: abc.Iterable[int] = (),
        window_tables: abc.Iterable[list[int]] = (),
    ) -> None:
        """Assert that every block is free, cached or referenced as often as it occurs in `tables`.

        `state_slots` are those that sequences and steps in flight hold, see `StatePool.check_integrity`;
        `window_tables` are the block tables of layers with a window.
        """
        references = Counter(block for table in tables for block in table)
        assert self._ref_counts == [references[block] for block in range(self.num_blocks)], "a block is miscounted"
        self._prefix_cache.check_integrity()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not any(block in references or block in self._prefix_cache for block in free), "a block in use is free"
        accounted = len(free) + len(references) + self._prefix_cache.num_evictable
        assert accounted == self.num_blocks, "a block is lost, or evictable while it is referenced"
        self.states.check_integrity(state_slots, self._prefix_cache.__contains__)
        if self.window is not None:
            self.window.check_integrity(window_tables, self._prefix_cache.__contains__)

    def _evict_cached(self) -> int:
        block = self._prefix_cache.evict()
        self.states.drop_snapshot(block)
        if self.window is not None:
            self.window.drop(block)
        return block

    def _ref(self, block: int) -> None:
        if not self._ref_counts[block]:
            self._prefix_cache.pin(block)
        self._ref_counts[block] += 1

    def _unref(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            if block in self._prefix_cache:
                self._prefix_cache.unpin(block)
            else:
                self._free.append(block)


class HostBuffer:
    """Blocks of host memory for swapped sequences. Each belongs to at most one sequence."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks for a sequence; the caller has checked that there are enough."""
        assert 1 <= num_blocks <= self.num_free
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        """Take back `blocks` and empty the list."""
        self._free.extend(reversed(blocks))
        blocks.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that every block is free or in exactly one of `tables`."""
        accounted = sorted([block for table in tables for block in table] + self._free)
        assert accounted == list(range(self.num_blocks)), "a host block is lost or held twice"
