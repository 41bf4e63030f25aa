"""The scheduler's decision for one step, and the builder that assembles it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.blocks.prefix_cache import Key
from fastgen.core.sequence import UNKNOWN, Sequence


@dataclass(slots=True, eq=False)
class Chunk:
    """One sequence's tokens in a step: `sequence.tokens[start : start + num_tokens]`, at positions from `start`.

    Immutable by convention.

    Attributes:
        samples: whether a token is sampled after this chunk: it ends with the sequence's last pending token, and the
            sequence is not pooled. Fixed at construction, because the sequence grows when the step is scheduled.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        pending = len(self.sequence.tokens) - self.start
        assert self.start == self.sequence.num_computed_tokens
        assert 1 <= self.num_tokens <= pending
        self.samples = self.num_tokens == pending and self.sequence.pooling is None


class StepPlan:
    """What one step computes, swaps and preempts. Immutable by convention.

    The chunks are kept as columns: creating and reading an object for each of hundreds of decodes takes longer than
    all other work on them. Chunks of one token come first, then longer ones.

    Args:
        chunks: all but the continued ones.
        preempted, swap_out, swap_in: as the attributes.
        continued: sequences whose chunk is their next decode, below `Sequence.decodes_until`, and where they start.

    Attributes:
        sequences: of each chunk.
        starts, ends: of each chunk; it computes `sequence.tokens[start:end]`.
        samples: of each chunk, whether a token is sampled after it.
        num_continued: how many chunks, the first ones, are those of `continued`. Each is the token sampled last.
        preempted: sequences that lost their blocks. Swapped ones hold host blocks, the others will be recomputed.
        swap_out: (cache block, host block) pairs to copy to the host first, so that the step may overwrite the block.
        swap_in: (cache block, host block) pairs to copy back next, before anything is computed.
    """

    __slots__ = ("ends", "num_continued", "preempted", "samples", "sequences", "starts", "swap_in", "swap_out")

    def __init__(
        self,
        chunks: abc.Sequence[Chunk] = (),
        preempted: tuple[Sequence, ...] = (),
        swap_out: tuple[tuple[int, int], ...] = (),
        swap_in: tuple[tuple[int, int], ...] = (),
        *,
        continued: tuple[list[Sequence], list[int]] = ([], []),
    ) -> None:
        sequences, starts = continued
        self.num_continued = len(sequences)
        self.sequences = sequences + [chunk.sequence for chunk in chunks]
        self.starts = starts + [chunk.start for chunk in chunks]
        self.ends = [start + 1 for start in starts] + [chunk.start + chunk.num_tokens for chunk in chunks]
        self.samples = [True] * len(sequences) + [chunk.samples for chunk in chunks]
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
        """Tokens that their sequences sampled last. The others belong to prompts, or are recomputed."""
        return self.num_continued + sum(map(self.is_decode, range(self.num_continued, len(self.sequences))))

    def is_decode(self, index: int) -> bool:
        """Return whether a chunk is the token that its sequence sampled last."""
        return index < self.num_continued or (
            self.samples[index]
            and self.ends[index] - self.starts[index] == 1
            and self.starts[index] >= self.sequences[index].num_prompt_tokens
        )


def _scheduled_chunk(sequence: Sequence, start: int, end: int, samples: bool) -> Chunk:
    """Return a chunk whose sequence has advanced since it was scheduled."""
    chunk = Chunk.__new__(Chunk)
    chunk.sequence, chunk.start, chunk.num_tokens, chunk.samples = sequence, start, end - start, samples
    return chunk


@dataclass(slots=True)
class StepPlanBuilder:
    """A step plan under construction. Adding a chunk allocates its blocks and spends token budget.

    DeepSpeed-FastGen (Holmes et al., 2024), section 3: the latency of a step depends on its number of tokens, and
    hardly on how they are grouped into sequences. So decodes and prompt chunks draw on one budget.

    Attributes:
        tokens_left: token budget not yet spent.
        admits: whether waiting sequences may be admitted.
        num_decodes: sequences with one pending token that ran before.
        num_prompt_tokens: other tokens of the step.
        unfinished: prompts that are mid-prefill before or after this step.
        keys: for each prompt, the key of the first block that this step computes: the prefix cache will have it.
    """

    pool: BlockPool
    tokens_left: int
    admits: bool = True
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    unfinished: list[Sequence] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)
    _continued: list[Sequence] = field(default_factory=list)
    _decodes: list[Chunk] = field(default_factory=list)
    _prompts: dict[Sequence, int] = field(default_factory=dict)  # tokens of each

    def add_continued(self, sequences: list[Sequence]) -> None:
        """Add the token sampled last of each of these sequences, as `Sequence.decodes_until` allows."""
        assert len(sequences) <= self.tokens_left
        self.tokens_left -= len(sequences)
        self.num_decodes += len(sequences)
        self._continued = sequences

    def add_decode(self, sequence: Sequence) -> None:
        """Add the only pending token of a sequence, whose block is allocated already."""
        assert self.tokens_left >= 1
        self.tokens_left -= 1
        self.num_decodes += 1
        self._decodes.append(Chunk(sequence, sequence.num_computed_tokens, 1))

    def add_prompt(self, sequence: Sequence, most: int) -> bool:
        """Add at most `most` further pending tokens, as budget and blocks allow. Return False if that is none."""
        start, before = sequence.num_computed_tokens, self._prompts.get(sequence, 0)
        capacity = self.pool.token_capacity(sequence.block_table, start + before)
        added = min(self.num_left(sequence), most, self.tokens_left, capacity)
        if added < 1:
            return False
        self.tokens_left -= added
        self.num_prompt_tokens += added
        size = self._prompts[sequence] = before + added
        self.pool.extend(sequence.block_table, start + size)
        block = start // self.pool.block_size
        if sequence.cache_salt is not None and start + size >= (block + 1) * self.pool.block_size:
            self.keys.add(self.pool.key(sequence.block_table, sequence.tokens, sequence.cache_salt, block))
        return True

    def num_left(self, sequence: Sequence) -> int:
        """Return the pending tokens of a sequence that are not in this step."""
        return sequence.num_pending_tokens - self._prompts.get(sequence, 0)

    @property
    def decode_kv_tokens(self) -> int:
        """Tokens of the decodes' sequences that are in the cache."""
        continued = sum([sequence.num_computed_tokens for sequence in self._continued])
        return continued + sum([chunk.start for chunk in self._decodes])

    def build(self) -> StepPlan:
        """Advance the sequences and return the plan, with chunks of one token first."""
        starts = []
        for sequence in self._continued:  # the same as `advance(1)`, which takes three times as long
            start = sequence.num_computed_tokens
            starts.append(start)
            sequence.num_computed_tokens = start + 1
            sequence.num_in_flight += 1
            sequence.tokens.append(UNKNOWN)
        prompts = [Chunk(sequence, sequence.num_computed_tokens, size) for sequence, size in self._prompts.items()]
        for chunk in (*self._decodes, *prompts):
            chunk.sequence.advance(chunk.num_tokens)
        prompts.sort(key=lambda chunk: chunk.num_tokens > 1)
        return StepPlan(
            (*self._decodes, *prompts),
            tuple(self.preempted),
            tuple(self.swap_out),
            tuple(self.swap_in),
            continued=(self._continued, starts),
        )
