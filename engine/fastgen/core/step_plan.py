"""One forward pass: what it computes, and how it comes together."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.core.block_pool import BlockPool
from fastgen.core.prefix_cache import Key
from fastgen.core.sequence import Sequence
from fastgen.core.token_budget import TokenBudget


@dataclass(slots=True, init=False, eq=False)
class Chunk:
    """One sequence's share of a pass: `sequence.tokens[start : start + num_tokens]`, at positions from `start`.

    Never changed once made. It is not frozen because a pass makes hundreds, and freezing takes four times as long.

    `samples`: does a token follow this chunk? Only a sequence's last pending token has logits worth sampling. Settled
    when the chunk is made: the sequence grows once the pass is done, the chunk must not change with it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    def __init__(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        pending = len(sequence.tokens) - start
        assert start == sequence.num_computed_tokens
        assert 1 <= num_tokens <= pending
        self.sequence = sequence
        self.start = start
        self.num_tokens = num_tokens
        self.samples = num_tokens == pending


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes: chunks of one token first, then longer ones, and who lost its blocks for it.

    Attributes:
        preempted: those that are recomputed later and those that are swapped out: the latter hold host blocks.
        swap_out: (block of the cache, block of the host buffer): copied before anything else, so that the block may be
            written in this very pass.
        swap_in: the same pairs, copied the other way after those, before anything is computed.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Forward tokens of the pass."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the pass reads: all that its sequences have after it."""
        return sum([chunk.start + chunk.num_tokens for chunk in self.chunks])


class StepPlanBuilder:
    """A pass while it is being filled: blocks are taken as chunks are added."""

    def __init__(self, pool: BlockPool, token_budget: int) -> None:
        self.budget = TokenBudget(token_budget)
        self.preempted: list[Sequence] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.decodes: list[Chunk] = []
        self.num_prompt_tokens = 0
        self._prompts: list[Chunk] = []
        self._pool = pool
        self._computes: set[Key] = set()

    def add_decodes(self, chunks: list[Chunk]) -> None:
        """Chunks of one token, whose blocks have been taken."""
        if chunks:
            self.budget.take(len(chunks))
        self.decodes = chunks

    def add_prompt(self, sequence: Sequence) -> bool:
        """As many of the sequence's pending tokens as budget and blocks allow; False if that is none."""
        room = self._pool.room(sequence.block_table, sequence.num_computed_tokens)
        size = min(sequence.num_pending_tokens, self.budget.left, room)
        if size < 1:
            return False
        self.budget.take(size)
        self.num_prompt_tokens += size
        start = sequence.num_computed_tokens
        self._pool.extend(sequence.block_table, start + size)
        self._prompts.append(Chunk(sequence, start, size))
        block = start // self._pool.block_size
        if sequence.cache_salt is not None and start + size >= (block + 1) * self._pool.block_size:
            self._computes.add(self._pool.key(sequence.block_table, sequence.tokens, sequence.cache_salt, block))
        return True

    def computes(self, key: Key) -> bool:
        """Is the block that would be known by `key` computed in this pass? Then it can be had in the next one."""
        return key in self._computes

    def finish(self) -> StepPlan:
        """The pass."""
        single = [chunk for chunk in self._prompts if chunk.num_tokens == 1]
        longer = [chunk for chunk in self._prompts if chunk.num_tokens > 1]
        return StepPlan(
            (*self.decodes, *single, *longer), tuple(self.preempted), tuple(self.swap_out), tuple(self.swap_in)
        )
