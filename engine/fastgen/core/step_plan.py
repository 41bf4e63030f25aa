"""The scheduler's decision for one step, and the builder that assembles it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from fastgen.core.block_pool import BlockPool
from fastgen.core.prefix_cache import Key
from fastgen.core.sequence import Sequence


@dataclass(slots=True, init=False, eq=False)
class Chunk:
    """One sequence's tokens in a step: `sequence.tokens[start : start + num_tokens]`, at positions from `start`.

    Immutable by convention.

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


class StepPlan:
    """What one step computes, swaps and preempts. Immutable by convention.

    The chunks are kept as columns: creating and reading an object for each of hundreds of decodes takes longer than
    all other work on them. Chunks of one token come first, then longer ones.

    Args:
        chunks: chunks besides the decodes.
        preempted, swap_out, swap_in: as the attributes.
        decoding: sequences of which the step computes the only pending token.

    Attributes:
        sequences: of each chunk.
        starts, ends: of each chunk; it computes `sequence.tokens[start:end]`.
        samples: of each chunk, whether a token is sampled after it.
        num_decodes: the first so many chunks are those of `decoding`. They sample and have no prompt logprobs.
        preempted: sequences that lost their blocks. Swapped ones hold host blocks, the others will be recomputed.
        swap_out: (cache block, host block) pairs to copy to the host first, so that the step may overwrite the block.
        swap_in: (cache block, host block) pairs to copy back next, before anything is computed.
    """

    __slots__ = ("ends", "num_decodes", "preempted", "samples", "sequences", "starts", "swap_in", "swap_out")

    def __init__(
        self,
        chunks: abc.Sequence[Chunk] = (),
        preempted: tuple[Sequence, ...] = (),
        swap_out: tuple[tuple[int, int], ...] = (),
        swap_in: tuple[tuple[int, int], ...] = (),
        *,
        decoding: abc.Sequence[Sequence] = (),
    ) -> None:
        starts = [sequence.num_computed_tokens for sequence in decoding]
        self.num_decodes = len(starts)
        self.sequences = [*decoding, *[chunk.sequence for chunk in chunks]]
        self.ends = [start + 1 for start in starts] + [chunk.start + chunk.num_tokens for chunk in chunks]
        self.starts = starts + [chunk.start for chunk in chunks]
        self.samples = [True] * len(starts) + [chunk.samples for chunk in chunks]
        self.preempted = preempted
        self.swap_out = swap_out
        self.swap_in = swap_in

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.ends) - sum(self.starts)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the step reads, including those it computes."""
        return sum(self.ends)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks as objects. Code that runs in every step reads the columns."""
        columns = zip(self.sequences, self.starts, self.ends, self.samples, strict=True)
        return tuple(_scheduled_chunk(*chunk) for chunk in columns)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that their sequences sampled last. The other ones belong to prompts or are computed once more."""
        first = self.num_decodes
        decodes = [start >= s.num_prompt_tokens for s, start in zip(self.sequences[:first], self.starts, strict=False)]
        others = zip(*(column[first:] for column in (self.sequences, self.starts, self.ends, self.samples)), strict=True)
        return sum(decodes) + sum(
            samples and end - start == 1 and start >= sequence.num_prompt_tokens
            for sequence, start, end, samples in others
        )


def _scheduled_chunk(sequence: Sequence, start: int, end: int, samples: bool) -> Chunk:
    """Return a chunk whose sequence has advanced since it was scheduled."""
    chunk = Chunk.__new__(Chunk)
    chunk.sequence, chunk.start, chunk.num_tokens, chunk.samples = sequence, start, end - start, samples
    return chunk


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
        self.decoding: list[Sequence] = []
        self.num_prompt_tokens = 0
        self._prompts: list[Chunk] = []
        self._pool = pool
        self.keys: set[Key] = set()

    def add_decodes(self, decoding: list[Sequence]) -> None:
        """Add the only pending token of each of these sequences, whose blocks are allocated already."""
        assert len(decoding) <= self.tokens_left
        self.tokens_left -= len(decoding)
        self.decoding = decoding

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
        plan = StepPlan(
            (*single, *longer), tuple(self.preempted), tuple(self.swap_out), tuple(self.swap_in), decoding=self.decoding
        )
        for sequence in self.decoding:
            sequence.advance(1)
        for chunk in self._prompts:
            chunk.sequence.advance(chunk.num_tokens)
        return plan
