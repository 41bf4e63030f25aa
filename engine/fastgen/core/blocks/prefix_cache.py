"""Prefix cache: finds the block that holds the KV of a given prefix.

The key of a full block is its own tokens and its parent: the block before it or, for the first block of a prompt, the
request's cache salt. Keys are thus chained, and a chain of keys stands for all tokens from the start. A lookup hashes
the key and compares its tokens, so two different prefixes never match.

A parent's block number identifies the prefix before it, because the number cannot be reused for other tokens while a
child is cached: a sequence that references a child references its parent, a table is released last block first, and the
block released first is evicted first. `check_integrity` asserts this. Block-wise prefix caching with LRU eviction
follows vLLM (docs/design/prefix_caching.md there).
"""

from __future__ import annotations

from collections import OrderedDict

# Parent block or salt, and the block's tokens.
BlockKey = tuple[int | str, tuple[int, ...]]


class PrefixCache:
    """Cached blocks by key. Blocks that no sequence references are evictable, least recently used first."""

    __slots__ = ("_block_of", "_evictable", "_key_of")

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no sequence references."""
        return len(self._evictable)

    def find(self, key: BlockKey) -> int | None:
        """Return the block with this key, or None."""
        return self._block_of.get(key)

    def add(self, key: BlockKey, block: int) -> None:
        """Add a full, referenced block under a new key; its parent is cached already."""
        assert block not in self._key_of
        assert key not in self._block_of
        self._block_of[key] = block
        self._key_of[block] = key

    def pin(self, block: int) -> None:
        """Protect an evictable block: a sequence references it again."""
        del self._evictable[block]

    def unpin(self, block: int) -> None:
        """Make a block evictable, as the most recently used one: no sequence references it any more."""
        self._evictable[block] = None

    def evict(self) -> int:
        """Remove the least recently used evictable block and return it."""
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check_integrity(self) -> None:
        """Assert that both indexes agree, and that every parent is cached and evicted after its children."""
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        assert self._evictable.keys() <= self._key_of.keys()
        position = {block: index for index, block in enumerate(self._evictable)}
        for block, (parent, _) in self._key_of.items():
            if isinstance(parent, int):
                assert parent in self._key_of, "a cached block outlived its parent"
                assert parent not in position or (block in position and position[block] < position[parent]), (
                    "a parent would be evicted before its child"
                )
