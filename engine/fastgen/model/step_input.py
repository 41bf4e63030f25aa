"""The input of one step as flat arrays, built once and used by every layer on any device.

The rows of a step are its tokens: first the chunks of one token (decodes), then the longer chunks one after another,
without padding.
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
    """A chunk of several tokens.

    Attributes:
        row, num_tokens: its first row and number of rows.
        context: computed tokens of its sequence before the chunk.
        table_start: index of its first block in `StepInput.tables`.
        blocks: blocks of context and chunk, in order.
    """

    row: int
    num_tokens: int
    context: int
    table_start: int
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class StepInput:
    """The arrays of one step with T rows: the first D are decodes, S are sampled, P get prompt logprobs.

    Attributes:
        token_ids: [T].
        positions: [T], position of each row in its sequence.
        blocks, slots: [T], cache location of each row's key and value.
        logit_rows: [S + P], rows that need logits: the sampled rows in chunk order, then the rows with prompt logprobs.
        num_sampled: S.
        tables: block tables of all sequences, concatenated.
        table_starts: [D], index of each decode's first block in `tables`.
        contexts: [D], number of keys that each decode attends to, including its own.
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
        """Tokens of the step."""
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Number of chunks of one token."""
        return len(self.contexts)

    @classmethod
    def from_plan(cls, plan: StepPlan, *, block_size: int) -> StepInput:
        """Flatten a step plan."""
        chunks = plan.chunks
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        first_rows = np.cumsum(counts) - counts
        table_sizes = np.array([len(chunk.sequence.block_table) for chunk in chunks], np.int64)
        table_starts = np.cumsum(table_sizes) - table_sizes
        all_blocks = chain.from_iterable(chunk.sequence.block_table for chunk in chunks)
        tables = np.fromiter(all_blocks, np.int64, int(table_sizes.sum()))
        num_decodes = int(np.searchsorted(counts > 1, True))
        assert (counts[num_decodes:] > 1).all(), "chunks of one token must come first"
        chunk_of_row = np.repeat(np.arange(len(chunks)), counts)
        positions = starts[chunk_of_row] + np.arange(len(chunk_of_row)) - first_rows[chunk_of_row]
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        sampled_rows = (first_rows + counts - 1)[samples]
        return cls(
            token_ids=_token_ids(chunks, num_decodes),
            positions=positions,
            blocks=tables[table_starts[chunk_of_row] + positions // block_size],
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
    """Return how many rows of a chunk, from its first, predict a prompt token whose logprob was requested."""
    sequence = chunk.sequence
    if sequence.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.num_tokens, sequence.num_prompt_tokens - 1 - chunk.start))


def _scored_rows(chunks: tuple[Chunk, ...], first_rows: IntArray) -> list[IntArray]:
    return [
        np.arange(row, row + count)
        for row, chunk in zip(first_rows, chunks, strict=True)
        if (count := num_scored(chunk))
    ]
