"""Which block of the cache holds the KV of which prefix.

A full block is known by its key: its own tokens and its parent, which is the block before it, or, for the first block
of a prompt, the request's cache salt. So keys are chained, and a chain of keys stands for all tokens from the start.
Looking one up hashes the key and compares its tokens, so two prefixes are never taken for each other.

A parent's number stands for all that is before it because it cannot be given to other tokens while a child is known:
whoever holds a child holds its parent, blocks are let go of last one first, and the one let go of first is evicted
first. `check_integrity` asserts it. Prefix caching by blocks with eviction of the least recently used: vLLM's automatic
prefix caching (docs/design/prefix_caching.md there).
"""

from __future__ import annotations

from collections import OrderedDict

# Parent block or salt, and the block's tokens.
Key = tuple[int | str, tuple[int, ...]]


class PrefixCache:
    """Blocks by key, and those of them that nobody holds, least recently used first."""

    __slots__ = ("_block_of", "_idle", "_key_of")

    def __init__(self) -> None:
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    @property
    def num_idle(self) -> int:
        """Known blocks that nobody holds: they can be evicted."""
        return len(self._idle)

    def find(self, key: Key) -> int | None:
        """The block with this key, or None."""
        return self._block_of.get(key)

    def add(self, key: Key, block: int) -> None:
        """Makes a full block that somebody holds known. Its key and itself are new, its parent is known."""
        assert block not in self._key_of
        assert key not in self._block_of
        self._block_of[key] = block
        self._key_of[block] = key

    def hold(self, block: int) -> None:
        """Somebody holds an idle block again."""
        del self._idle[block]

    def rest(self, block: int) -> None:
        """Nobody holds a known block any more: it becomes the one used last."""
        self._idle[block] = None

    def evict(self) -> int:
        """Forgets the idle block that was used least recently and returns it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check_integrity(self) -> None:
        """Asserts that both directions agree, and that a block's parent is known and evicted after it."""
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        assert self._idle.keys() <= self._key_of.keys()
        age = {block: turn for turn, block in enumerate(self._idle)}
        for block, (parent, _) in self._key_of.items():
            if isinstance(parent, int):
                assert parent in self._key_of, "a cached block outlived its parent"
                held = parent not in age
                assert held or (block in age and age[block] < age[parent]), "a parent would be evicted before its child"
