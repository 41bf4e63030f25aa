"""The input of a forward pass, prepared on the host: flat arrays, built once and used by every layer.

The rows of a step are its tokens: first the chunks of one token (decodes), then the longer chunks one after another,
without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.model.step_input import BlockTables, StepInput, enlarged

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk of several tokens.

    Attributes:
        sequence: index of its sequence in the step.
        row, num_tokens: its first row and number of rows.
        context: computed tokens of its sequence before the chunk.
        table_start: index of its first block in `ForwardInput.tables`.
        blocks: blocks of context and chunk, in order.
    """

    sequence: int
    row: int
    num_tokens: int
    context: int
    table_start: int
    blocks: IntArray

    def within_chunks(self, size: int, pages: int) -> Iterator[ChunkSpan]:
        """Cut the span at multiples of `size` positions, that is of so many pages, and forget what is before them."""
        end = self.context + self.num_tokens
        for number in range(self.context // size, (end - 1) // size + 1):
            first, last = max(self.context, number * size), min(end, (number + 1) * size)
            yield replace(
                self,
                row=self.row + first - self.context,
                num_tokens=last - first,
                context=first - number * size,
                table_start=self.table_start + number * pages,
                blocks=self.blocks[number * pages : (number + 1) * pages],
            )


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """The arrays of one step with T rows.

    The first D rows are decodes. N rows are sampled, P are scored and Q are pooled, as in `StepInput`.

    Attributes:
        token_ids: [T].
        positions: [T], position of each row in its sequence.
        blocks, slots: [T], cache location of each row's key and value.
        logit_rows: [N + P + Q], rows whose last hidden states are needed: the sampled rows in chunk order, then the
            scored ones, then the pooled ones.
        tables: block tables of all rows of the runner in one array.
        table_starts: [D], index of each decode's first block in `tables`.
        contexts: [D], number of keys of each decode's sequence, including its own.
        chunks: chunks of several tokens.
        state_slots, state_sources, state_saves: as in `StepInput`.
        windowed: the input of layers with a sliding window, with their cache locations and block tables; None if all
            layers have the same. Blocks of it that the window has left are arbitrary.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    slots: IntArray
    logit_rows: IntArray
    tables: IntArray
    table_starts: IntArray
    contexts: IntArray
    chunks: tuple[ChunkSpan, ...]
    state_slots: IntArray
    state_sources: IntArray
    state_saves: IntArray
    windowed: ForwardInput | None = None

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Number of chunks of one token."""
        return len(self.contexts)

    def within_chunks(self, size: int, block_size: int) -> ForwardInput:
        """Return the input for layers in which positions attend only within chunks of `size`, whole blocks.

        Every sequence begins with its last chunk, and a prompt chunk in several of them is cut. Cache locations, rows
        and positions stay.
        """
        assert size % block_size == 0
        pages = size // block_size
        begun = (self.contexts - 1) // size
        return replace(
            self,
            table_starts=self.table_starts + begun * pages,
            contexts=self.contexts - begun * size,
            chunks=tuple(part for span in self.chunks for part in span.within_chunks(size, pages)),
        )


class HostRows:
    """Block table and last token of each row of a runner that prepares its input on the host.

    Attributes:
        last_ids: [rows], token sampled last; set it after sampling.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables = BlockTables(np.int64)
        self._window_tables = BlockTables(np.int64)
        self.last_ids = np.zeros(1, np.int64)

    def apply(self, step: StepInput) -> ForwardInput:
        """Apply the updates of a step and return the input of its forward pass."""
        self._tables.update(step.table_updates)
        self.last_ids = enlarged(self.last_ids, len(self._tables.blocks))
        decodes = step.num_decodes
        first_rows, counts = step.query_starts[:-1], np.diff(step.query_starts)
        contexts = step.seq_lens - counts
        sampled_rows = first_rows[step.sampled] + counts[step.sampled] - 1
        found = ForwardInput(
            token_ids=self._token_ids(step),
            positions=np.repeat(contexts - first_rows, counts) + np.arange(step.num_tokens),
            logit_rows=np.concatenate((sampled_rows, step.scored_tokens, step.pooled_tokens)).astype(np.int64),
            contexts=step.seq_lens[:decodes].astype(np.int64),
            state_slots=step.state_slots.astype(np.int64),
            state_sources=step.state_sources.astype(np.int64),
            state_saves=step.state_saves.astype(np.int64),
            **self._places(step, self._tables, step.slot_mapping),
        )
        if not len(step.window_slots):
            return found
        self._window_tables.update(step.window_updates)
        windowed = replace(found, **self._places(step, self._window_tables, step.window_slots))
        return replace(found, windowed=windowed)

    def _places(self, step: StepInput, block_tables: BlockTables, slots: npt.NDArray[np.int32]) -> dict[str, Any]:
        """Return the fields of a `ForwardInput` that say where keys and values are, given the cache slots [T]."""
        size, tables = self._block_size, block_tables.blocks
        starts, counts = step.rows.astype(np.int64) * tables.shape[1], np.diff(step.query_starts)
        return {
            "blocks": (slots // size).astype(np.int64),
            "slots": (slots % size).astype(np.int64),
            "tables": tables.ravel(),
            "table_starts": starts[: step.num_decodes],
            "chunks": tuple(
                ChunkSpan(
                    sequence=i,
                    row=int(step.query_starts[i]),
                    num_tokens=int(counts[i]),
                    context=int(step.seq_lens[i] - counts[i]),
                    table_start=int(starts[i]),
                    blocks=tables[step.rows[i], : -(-int(step.seq_lens[i]) // size)],
                )
                for i in range(step.num_decodes, len(step.rows))
            ),
        }

    def _token_ids(self, step: StepInput) -> IntArray:
        """Return the token ids, with those sampled last filled in. Only decodes can have them."""
        token_ids = step.token_ids.astype(np.int64)
        decodes = token_ids[: step.num_decodes]
        decodes[:] = np.where(decodes < 0, self.last_ids[step.rows[: step.num_decodes]], decodes)
        return token_ids
