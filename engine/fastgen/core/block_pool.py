"""The pool of KV cache blocks: who may read and write where.

PagedAttention (Kwon et al., 2023): a sequence's KV lies in blocks of equal size anywhere in the cache; its block table
lists them in order. Nothing is reserved ahead of need, so the only waste is the last block's unused slots. Full blocks
are never written again, so sequences that begin the same hold them together.
"""

from __future__ import annotations

from collections import Counter, abc

from fastgen.core.prefix_cache import Key, PrefixCache


class BlockPool:
    """Hands out block numbers `0 .. num_blocks - 1` and takes them back.

    A block is held by one sequence or more, or rests in the prefix cache, where it may be found or evicted, or is free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Used as a stack: the block freed last is the likeliest to be in a CPU cache still.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._prefix_cache = PrefixCache()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those in the prefix cache among them."""
        return len(self._free) + self._prefix_cache.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def room(self, table: list[int], num_computed: int) -> int:
        """Tokens that a sequence with `num_computed` tokens in the blocks of `table` could add now."""
        return (len(table) + self.num_free) * self.block_size - num_computed

    def num_shared(self, table: list[int]) -> int:
        """Blocks of `table` that others hold too."""
        holders = self._holders
        return sum(holders[block] > 1 for block in table)

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Grows `table` in place until it holds `num_tokens` tokens. The caller has made sure of the room.

        Free blocks first, then the least recently used of the prefix cache.
        """
        missing = self.blocks_for(num_tokens) - len(table)
        assert missing <= self.num_free, f"{missing} blocks wanted, {self.num_free} free"
        for _ in range(missing):
            block = self._free.pop() if self._free else self._prefix_cache.evict()
            self._holders[block] = 1
            table.append(block)

    def release(self, table: list[int]) -> None:
        """Lets go of all blocks of `table` and empties it."""
        for block in reversed(table):  # children before their parents, see `fastgen.core.prefix_cache`
            self._let_go(block)
        table.clear()

    def key(self, table: list[int], tokens: list[int], salt: str, index: int) -> Key:
        """What block `index` of a sequence is known by in the prefix cache; `table` holds the blocks before it."""
        start = index * self.block_size
        return (table[index - 1] if index else salt, tuple(tokens[start : start + self.block_size]))

    def match(self, tokens: list[int], salt: str, num_blocks: int) -> list[int]:
        """A table of the leading full blocks of `tokens` that are cached, at most `num_blocks`. They are held now."""
        table: list[int] = []
        for index in range(num_blocks):
            block = self._prefix_cache.find(self.key(table, tokens, salt, index))
            if block is None:
                break
            self._hold(block)
            table.append(block)
        return table

    def publish(self, table: list[int], tokens: list[int], salt: str, published: int, num_computed: int) -> int:
        """Makes full blocks of `table` from number `published` on known to the prefix cache; returns how many are now.

        Where the cache knows an equal block already, `table` gets that one instead of its own.
        """
        num_full = num_computed // self.block_size
        for index in range(published, num_full):
            key, own = self.key(table, tokens, salt, index), table[index]
            known = self._prefix_cache.find(key)
            if known is None:
                self._prefix_cache.add(key, own)
            else:
                self._hold(known)
                table[index] = known
                self._let_go(own)
        return num_full

    def check_integrity(self, tables: abc.Sequence[list[int]]) -> None:
        """Asserts that each block is free, cached or held, and held as often as `tables` (of all alive) name it."""
        holders = Counter(block for table in tables for block in table)
        assert self._holders == [holders[block] for block in range(self.num_blocks)], "a block is miscounted"
        self._prefix_cache.check_integrity()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not any(block in holders or block in self._prefix_cache for block in free), "a block in use is free"
        held_or_free = len(free) + len(holders) + self._prefix_cache.num_idle
        assert held_or_free == self.num_blocks, "a KV block is lost or held while it rests"

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            self._prefix_cache.hold(block)
        self._holders[block] += 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            if block in self._prefix_cache:
                self._prefix_cache.rest(block)
            else:
                self._free.append(block)
