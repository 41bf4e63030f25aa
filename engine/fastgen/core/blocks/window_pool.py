"""The pool of KV blocks of layers with a sliding window, which keep only the tokens that later ones can attend to.

A sequence has a second block table for them, as long as its first. A block that the window has left is freed; its entry
becomes `LEFT`. Blocks of the two tables at the same place hold the same tokens, in different layers.

The prefix cache finds a block here by the cached block of the other layers at its place, which stands for all tokens up
to its end. So the two need not be cached for equally long. A prefix can be used where this pool still has the blocks of
its last window. See docs/decisions/076.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, abc
from dataclasses import dataclass

# Entry of a block table whose block was freed. Kernels do not attend to it.
LEFT = -1


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The layers with a sliding window that have KV blocks of their own.

    Attributes:
        window: tokens that the layer with the longest window attends to, including the token itself.
        num_blocks: blocks of these layers.
    """

    window: int
    num_blocks: int


def most_held(window: int, block_size: int) -> int:
    """Return the blocks that a sequence of any length needs at most to advance by a token.

    They are those of the window, which may begin and end within a block, and the next one.
    """
    return -(-window // block_size) + 2


class WindowPool:
    """Allocates blocks `0 .. num_blocks - 1` for layers with a window, and counts the references to them.

    A block is referenced by sequences, or unreferenced and cached (reusable and evictable), or free.
    """

    def __init__(self, group: WindowGroup, block_size: int) -> None:
        assert group.num_blocks >= 1
        assert group.window >= 1
        self.num_blocks, self.window = group.num_blocks, group.window
        self._block_size = block_size
        self._most_held = most_held(group.window, block_size)
        self._free = list(range(group.num_blocks - 1, -1, -1))
        self._ref_counts = [0] * group.num_blocks
        self._block_of: dict[int, int] = {}  # by the cached block of the other layers
        self._place_of: dict[int, int] = {}  # the reverse
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of `num_tokens` tokens needs at a time."""
        return min(-(-num_tokens // self._block_size), self._most_held)

    def first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that a token after the last full block of `num_tokens` tokens reads."""
        return max(0, num_tokens // self._block_size * self._block_size - self.window + 1) // self._block_size

    def extend(self, table: list[int], length: int) -> None:
        """Append blocks to `table` up to this length. The caller has checked that there are enough.

        Takes free blocks first, then evicts the least recently used ones.
        """
        missing = length - len(table)
        assert missing <= self.num_free, f"{missing} blocks needed, {self.num_free} free"
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict_oldest()
            self._ref_counts[block] = 1
            table.append(block)

    def leave(self, table: list[int], first: int, end: int) -> None:
        """Drop the references to blocks `first` to `end - 1` of `table`: the window has left them."""
        for index in range(first, end):
            self._unref(table[index])
            table[index] = LEFT

    def release(self, table: list[int]) -> None:
        """Drop the references to all blocks of `table`, and clear it."""
        for block in reversed(table):
            if block != LEFT:
                self._unref(block)
        table.clear()

    def usable(self, places: abc.Sequence[int]) -> int:
        """Return the length of the longest beginning of `places` whose last window is cached.

        `places` are cached blocks of the other layers, in order.
        """
        longest = run = 0
        for length, place in enumerate(places, 1):
            run = run + 1 if place in self._block_of else 0
            if run >= length - self.first_needed(length * self._block_size):
                longest = length
        return longest

    def match(self, places: abc.Sequence[int]) -> list[int]:
        """Return the block table after `places`, of which `usable` are all, with a reference to each block."""
        first = self.first_needed(len(places) * self._block_size)
        table = [LEFT] * first
        for place in places[first:]:
            block = self._block_of[place]
            if not self._ref_counts[block]:
                del self._evictable[block]
            self._ref_counts[block] += 1
            table.append(block)
        return table

    def publish(self, place: int, block: int) -> None:
        """Add a full, referenced block to the prefix cache, unless it has an equal one."""
        if place not in self._block_of:
            assert block not in self._place_of
            self._block_of[place], self._place_of[block] = block, place

    def drop(self, place: int) -> None:
        """Remove the block at `place`, which leaves the prefix cache, if there is one."""
        block = self._block_of.pop(place, None)
        if block is None:
            return
        del self._place_of[block]
        if not self._ref_counts[block]:
            del self._evictable[block]
            self._free.append(block)

    def check_integrity(self, tables: abc.Iterable[list[int]], is_cached: abc.Callable[[int], bool]) -> None:
        """Assert that every block is free, cached or referenced as often as it occurs in `tables`."""
        references = Counter(block for table in tables for block in table if block != LEFT)
        assert self._ref_counts == [references[block] for block in range(self.num_blocks)], "a block is miscounted"
        assert self._block_of == {place: block for block, place in self._place_of.items()}
        assert all(map(is_cached, self._block_of)), "a block is found by a place that is not cached"
        unreferenced = {block for block in self._place_of if block not in references}
        assert set(self._evictable) == unreferenced, "a cached block cannot be evicted, or while it is referenced"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(references), "a block in use is free"
        assert free.isdisjoint(self._place_of), "a cached block is free"
        assert len(free) + len(references) + len(unreferenced) == self.num_blocks, "a block is lost"

    def _evict_oldest(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._place_of.pop(block)]
        return block

    def _unref(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            if block in self._place_of:
                self._evictable[block] = None
            else:
                self._free.append(block)
