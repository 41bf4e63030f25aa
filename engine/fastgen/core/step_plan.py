"""The scheduler's decision for one step, and the builder that assembles it."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.core.block_pool import BlockPool
from fastgen.core.prefix_cache import Key
from fastgen.core.sequence import Sequence


@dataclass(slots=True, init=False, eq=False)
class Chunk:
    """One sequence's tokens in a step: `sequence.tokens[start : start + num_tokens]`, at positions from `start`.

    Immutable by convention. Not a frozen dataclass: a step creates hundreds, and freezing takes four times as long.

    Attributes:
        samples: whether a token is sampled after this chunk, which is so if it ends with the sequence's last pending
            token. Fixed at construction, because the sequence grows when the step is scheduled.
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

    @property
    def is_decode(self) -> bool:
        """Return whether the chunk is the token that its sequence sampled last."""
        return self.samples and self.num_tokens == 1 and self.start >= self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, swaps and preempts.

    Attributes:
        chunks: chunks of one token first, then longer ones.
        preempted: sequences that lost their blocks. Swapped ones hold host blocks, the others will be recomputed.
        swap_out: (cache block, host block) pairs to copy to the host first, so that the step may overwrite the block.
        swap_in: (cache block, host block) pairs to copy back next, before anything is computed.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the step reads, including those it computes."""
        return sum([chunk.start + chunk.num_tokens for chunk in self.chunks])


class StepPlanBuilder:
    """A step plan under construction. Adding a chunk allocates its blocks and spends token budget.

    DeepSpeed-FastGen (Holmes et al., 2024), section 3: the latency of a step depends on its number of tokens, hardly on
    how they are grouped into sequences. So decodes and prompt chunks draw on one budget.

    Attributes:
        tokens_left: token budget not yet spent.
        keys: for each prompt, the key of the first block that this step computes: the prefix cache will have it.
    """

    def __init__(self, pool: BlockPool, token_budget: int) -> None:
        assert token_budget >= 1
        self.tokens_left = token_budget
        self.preempted: list[Sequence] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.decodes: list[Chunk] = []
        self.num_prompt_tokens = 0
        self._prompts: list[Chunk] = []
        self._pool = pool
        self.keys: set[Key] = set()

    def add_decodes(self, chunks: list[Chunk]) -> None:
        """Add chunks of one token whose blocks are allocated already."""
        assert len(chunks) <= self.tokens_left
        self.tokens_left -= len(chunks)
        self.decodes = chunks

    def add_prompt(self, sequence: Sequence) -> bool:
        """Add as many pending tokens as budget and blocks allow. Return False if that is none."""
        capacity = self._pool.token_capacity(sequence.block_table, sequence.num_computed_tokens)
        size = min(sequence.num_pending_tokens, self.tokens_left, capacity)
        if size < 1:
            return False
        self.tokens_left -= size
        self.num_prompt_tokens += size
        start = sequence.num_computed_tokens
        self._pool.extend(sequence.block_table, start + size)
        self._prompts.append(Chunk(sequence, start, size))
        block = start // self._pool.block_size
        if sequence.cache_salt is not None and start + size >= (block + 1) * self._pool.block_size:
            self.keys.add(self._pool.key(sequence.block_table, sequence.tokens, sequence.cache_salt, block))
        return True

    def build(self) -> StepPlan:
        """Advance the sequences and return the plan, with chunks of one token first."""
        single = [chunk for chunk in self._prompts if chunk.num_tokens == 1]
        longer = [chunk for chunk in self._prompts if chunk.num_tokens > 1]
        for chunk in (*self.decodes, *self._prompts):
            chunk.sequence.advance(chunk.num_tokens)
        return StepPlan(
            (*self.decodes, *single, *longer), tuple(self.preempted), tuple(self.swap_out), tuple(self.swap_in)
        )
