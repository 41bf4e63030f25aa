"""The scheduler's decision for one step."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from types import MappingProxyType

from fastgen.core.blocks.prefix_cache import BlockKey
from fastgen.core.blocks.state_pool import StateSave
from fastgen.core.sequence import Sequence
from fastgen.core.step_times import StepWork


@dataclass(slots=True, eq=False)
class Chunk:
    """One sequence's tokens in a step: `sequence.tokens[start : start + num_tokens]`.

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
        keys, state_sources, state_saves: as the attributes.

    Attributes:
        sequences: of each chunk.
        starts, ends: of each chunk; it computes `sequence.tokens[start:end]`.
        samples: of each chunk, whether a token is sampled after it.
        num_continued: how many chunks, the first ones, are those of `continued`. Each is the token sampled last.
        preempted: sequences that lost their blocks. Swapped ones hold host blocks, the others will be recomputed.
        swap_out: (cache block, host block) pairs to copy to the host first, so that the step may overwrite the block.
        swap_in: (cache block, host block) pairs to copy back next, before anything is computed.
        keys: for each prompt that shares blocks and fills one in this step, the key of the first one that it fills. The
            prefix cache has that block once the step is settled.
        state_sources: for sequences whose recurrent states are not in their own slot, the slot to read them from.
        state_saves: copies of states to make as the step computes them.
    """

    __slots__ = (
        "ends",
        "keys",
        "num_continued",
        "preempted",
        "samples",
        "sequences",
        "starts",
        "state_saves",
        "state_sources",
        "swap_in",
        "swap_out",
    )

    def __init__(
        self,
        chunks: abc.Sequence[Chunk] = (),
        preempted: tuple[Sequence, ...] = (),
        swap_out: tuple[tuple[int, int], ...] = (),
        swap_in: tuple[tuple[int, int], ...] = (),
        *,
        continued: tuple[list[Sequence], list[int]] = ([], []),
        keys: abc.Set[BlockKey] = frozenset(),
        state_sources: abc.Mapping[Sequence, int] = MappingProxyType({}),
        state_saves: abc.Sequence[StateSave] = (),
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
        self.keys = keys
        self.state_sources = state_sources
        self.state_saves = state_saves

    @property
    def snapshots(self) -> dict[Sequence, list[StateSave]]:
        """The snapshots that the step takes, by sequence."""
        found: dict[Sequence, list[StateSave]] = {}
        for save in self.state_saves:
            if save.is_snapshot:
                found.setdefault(save.sequence, []).append(save)
        return found

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.ends) - sum(self.starts)

    @property
    def work(self) -> StepWork:
        """What the step computes and reads, the sum of `StepWork.of_chunk` over the chunks."""
        kv_tokens = sum(self.ends)
        begin = self.num_continued
        pairs = sum(
            (end - start - 1) * start for start, end in zip(self.starts[begin:], self.ends[begin:], strict=True)
        )
        return StepWork(kv_tokens - sum(self.starts), kv_tokens, pairs)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks as objects. Code that runs in every step reads the columns."""
        columns = zip(self.sequences, self.starts, self.ends, self.samples, strict=True)
        return tuple(_scheduled_chunk(*chunk) for chunk in columns)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decodes: those that their sequences sampled last. Others are prompt tokens or recomputed."""
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
