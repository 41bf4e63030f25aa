"""A pass as flat arrays, made once and used by every layer, on any device.

The rows of a pass are its tokens: those of chunks of one token first (one row each), then longer chunks one after
another. No padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from fastgen.core.scheduler import Chunk, StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk of several tokens: its rows, the tokens of its sequence before it, and its blocks in order.

    `table_start` is where they begin in the pass's tables.
    """

    row: int
    num_tokens: int
    context: int
    table_start: int
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class StepInput:
    """The arrays of one pass with T rows, D of them decodes (the first D), S sampled and P scored.

    Attributes:
        token_ids: [T].
        positions: [T], in its sequence.
        blocks, slots: [T], where each row's key and value go.
        logit_rows: [S + P], rows whose logits are wanted: first those that are sampled, in the order of the chunks,
            then those of prompts whose log-probabilities are asked for.
        num_sampled: S.
        tables: block tables of all sequences, one after another.
        table_starts: [D], where each decode's block table begins in `tables`.
        contexts: [D], keys that each decode sees, its own among them.
        chunks: chunks of several tokens.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    slots: IntArray
    logit_rows: IntArray
    num_sampled: int
    tables: IntArray
    table_starts: IntArray
    contexts: IntArray
    chunks: tuple[ChunkSpan, ...]

    @property
    def num_rows(self) -> int:
        """Forward tokens of the pass."""
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Chunks of one token."""
        return len(self.contexts)

    @classmethod
    def from_plan(cls, plan: StepPlan, *, block_size: int) -> StepInput:
        """Flattens a pass."""
        chunks = plan.chunks
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        first_rows = np.cumsum(counts) - counts
        table_sizes = np.array([len(chunk.sequence.block_table) for chunk in chunks], np.int64)
        table_starts = np.cumsum(table_sizes) - table_sizes
        all_blocks = chain.from_iterable(chunk.sequence.block_table for chunk in chunks)
        tables = np.fromiter(all_blocks, np.int64, int(table_sizes.sum()))
        num_decodes = int(np.searchsorted(counts > 1, True))
        assert (counts[num_decodes:] > 1).all(), "chunks of one token come first"
        owner = np.repeat(np.arange(len(chunks)), counts)
        positions = starts[owner] + np.arange(len(owner)) - first_rows[owner]
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        sampled_rows = (first_rows + counts - 1)[samples]
        return cls(
            token_ids=_token_ids(chunks, num_decodes),
            positions=positions,
            blocks=tables[table_starts[owner] + positions // block_size],
            slots=positions % block_size,
            logit_rows=np.concatenate([sampled_rows, *_scored_rows(chunks, first_rows)]),
            num_sampled=len(sampled_rows),
            tables=tables,
            table_starts=table_starts[:num_decodes],
            contexts=starts[:num_decodes] + 1,
            chunks=tuple(
                ChunkSpan(
                    row=int(first_rows[i]),
                    num_tokens=int(counts[i]),
                    context=int(starts[i]),
                    table_start=int(table_starts[i]),
                    blocks=tables[table_starts[i] :][: -(-int(starts[i] + counts[i]) // block_size)],
                )
                for i in range(num_decodes, len(chunks))
            ),
        )


def _token_ids(chunks: tuple[Chunk, ...], num_decodes: int) -> IntArray:
    tokens = [chunk.sequence.tokens[chunk.start] for chunk in chunks[:num_decodes]]
    for chunk in chunks[num_decodes:]:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(tokens, np.int64)


def num_scored(chunk: Chunk) -> int:
    """Tokens of a chunk that have a prompt token after them whose log-probability is asked for: the chunk's first."""
    sequence = chunk.sequence
    if sequence.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.num_tokens, sequence.num_prompt_tokens - 1 - chunk.start))


def _scored_rows(chunks: tuple[Chunk, ...], first_rows: IntArray) -> list[IntArray]:
    asking = [index for index, chunk in enumerate(chunks) if chunk.sequence.sampling.prompt_logprobs is not None]
    counts = [(index, num_scored(chunks[index])) for index in asking]
    return [np.arange(first_rows[index], first_rows[index] + count) for index, count in counts if count]
