"""The pool of KV cache blocks: who may write where.

PagedAttention (Kwon et al., 2023): a sequence's KV lies in blocks of equal size anywhere in the cache; its block table
lists them in order. Nothing is reserved ahead of need, so the only waste is the last block's unused slots.
"""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers `0 .. num_blocks - 1` and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Used as a stack: the block freed last is the likeliest to be in a CPU cache still.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def room(self, table: list[int], num_computed: int) -> int:
        """Tokens that a sequence with `num_computed` tokens in the blocks of `table` could add now."""
        return (len(table) + self.num_free) * self.block_size - num_computed

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Grows `table` in place until it holds `num_tokens` tokens. The caller has made sure of the room."""
        missing = self.blocks_for(num_tokens) - len(table)
        assert missing <= self.num_free, f"{missing} blocks wanted, {self.num_free} free"
        for _ in range(missing):
            table.append(self._free.pop())

    def release(self, table: list[int]) -> None:
        """Takes all blocks of `table` back and empties it."""
        self._free.extend(reversed(table))
        table.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Asserts that every block is free or in exactly one of `tables` (those of all sequences alive)."""
        held = [block for table in tables for block in table]
        everything = sorted(held + self._free)
        assert everything == list(range(self.num_blocks)), "a KV block is lost or held twice"
