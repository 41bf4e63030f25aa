"""The input of one step: what the scheduler decided, as arrays for a runner.

A runner keeps state between steps: a row for each running sequence, with its block table, its sampling parameters and
the token sampled last. A `StepInput` holds only what the runner cannot know yet, so its size depends on the tokens of
the step and not on their contexts. It is picklable, and the same for every rank of a tensor-parallel group.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastgen.core.row_parameters import RowParameters
from fastgen.core.sequence import UNKNOWN, Sequence
from fastgen.core.step_plan import Chunk, StepPlan

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step with T tokens of S sequences; the first `num_decodes` sequences have one token each.

    All arrays are int32. Tokens of one sequence are adjacent and in order, and sequences follow one another without
    padding. Apply the updates in the order of the attributes.

    Attributes:
        swap_out: [n, 2], (cache block, host block) pairs to copy to the host buffer.
        swap_in: [n, 2], pairs to copy back.
        new_rows: rows that a sequence gets in this step; whatever they held before is void.
        table_updates: [3, n], new entries of block tables: row, position in the table, block.
        rows: [S], row of each sequence.
        query_starts: [S + 1], index of each sequence's first token, then T.
        seq_lens: [S], tokens of each sequence whose KV is in the cache after this step.
        token_ids: [T]; -1 stands for the token sampled last for the row.
        slot_mapping: [T], cache slot of each token's key and value: block * block size + offset.
        sampled: [N], sequences that sample a token, as indices of `rows`.
        masked: [M], those of them that need a grammar's mask, as indices of `sampled`.
        scored_tokens: [P], indices of tokens after which the logprob of the next prompt token is requested.
        scored_targets: [P], that next token.
        scored_top: [P], number of most likely tokens to report beside it.
    """

    swap_out: IntArray
    swap_in: IntArray
    new_rows: tuple[RowParameters, ...]
    table_updates: IntArray
    rows: IntArray
    query_starts: IntArray
    seq_lens: IntArray
    token_ids: IntArray
    slot_mapping: IntArray
    sampled: IntArray
    masked: IntArray
    scored_tokens: IntArray
    scored_targets: IntArray
    scored_top: IntArray
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)


class StepInputBuilder:
    """Assigns rows to sequences, and builds the input of each step.

    Steps must reach the runner in the order in which they are built. A row can be given to another sequence while a
    step in flight still computes it: runners apply updates in the order of steps.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._free: list[int] = []
        self._num_rows = 0

    def build(self, plan: StepPlan) -> StepInput:
        """Return the input for `plan`."""
        for sequence in plan.preempted:
            self.release(sequence)
        chunks = plan.chunks
        new_rows: list[RowParameters] = []
        updates: tuple[list[int], list[int], list[int]] = ([], [], [])
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.row is None:
                new_rows.append(self._admit(sequence))
            if sequence.num_sent_blocks < len(sequence.block_table):
                _update_table(sequence, updates)
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        num_decodes = int(np.searchsorted(counts > 1, True))
        assert (counts[num_decodes:] > 1).all(), "chunks of one token must come first"
        token_ids, slots = self._tokens(chunks, num_decodes)
        query_starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        sampled = [index for index, chunk in enumerate(chunks) if chunk.samples]
        return StepInput(
            swap_out=_array(plan.swap_out).reshape(-1, 2),
            swap_in=_array(plan.swap_in).reshape(-1, 2),
            new_rows=tuple(new_rows),
            table_updates=_array(updates),
            rows=_array([chunk.sequence.row for chunk in chunks]),
            query_starts=query_starts,
            seq_lens=_array([chunk.start + chunk.num_tokens for chunk in chunks]),
            token_ids=token_ids,
            slot_mapping=slots,
            sampled=_array(sampled),
            masked=_array([i for i, index in enumerate(sampled) if chunks[index].sequence.constraint is not None]),
            **_scored(chunks, query_starts),
            num_decodes=num_decodes,
        )

    def release(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that has ended or was preempted, if it has one."""
        if sequence.row is not None:
            self._free.append(sequence.row)
            sequence.row = None
            sequence.num_sent_blocks = 0

    def _admit(self, sequence: Sequence) -> RowParameters:
        if not self._free:
            self._free.append(self._num_rows)
            self._num_rows += 1
        sequence.row = self._free.pop()
        known = len(sequence.tokens) - (sequence.tokens[-1] == UNKNOWN)  # this step may sample the last one
        return RowParameters(
            sequence.row, sequence.sampling, sequence.seed, sequence.num_prompt_tokens, sequence.tokens[:known]
        )

    def _tokens(self, chunks: abc.Sequence[Chunk], num_decodes: int) -> tuple[IntArray, IntArray]:
        """Return token ids and slots of all tokens."""
        size, tokens, slots = self._block_size, [], []
        for chunk in chunks[:num_decodes]:
            sequence, start = chunk.sequence, chunk.start
            tokens.append(sequence.tokens[start])
            slots.append(sequence.block_table[start // size] * size + start % size)
        all_slots = [np.array(slots, np.int32)]
        for chunk in chunks[num_decodes:]:
            end = chunk.start + chunk.num_tokens
            tokens += chunk.sequence.tokens[chunk.start : end]
            first = chunk.start // size
            blocks = np.array(chunk.sequence.block_table[first : -(-end // size)], np.int32)
            positions = np.arange(chunk.start, end, dtype=np.int32)
            all_slots.append(blocks[positions // size - first] * size + positions % size)
        return np.array(tokens, np.int32), np.concatenate(all_slots)


def num_scored(chunk: Chunk) -> int:
    """Return how many tokens of a chunk, from its first, are followed by a prompt token whose logprob was requested."""
    sequence = chunk.sequence
    if sequence.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.num_tokens, sequence.num_prompt_tokens - 1 - chunk.start))


def _scored(chunks: abc.Sequence[Chunk], query_starts: IntArray) -> dict[str, IntArray]:
    tokens: list[int] = []
    targets: list[int] = []
    top: list[int] = []
    for chunk, first in zip(chunks, query_starts, strict=False):
        count = num_scored(chunk)
        if count:
            tokens += range(first, first + count)
            targets += chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + count]
            top += [chunk.sequence.sampling.prompt_logprobs or 0] * count
    return {"scored_tokens": _array(tokens), "scored_targets": _array(targets), "scored_top": _array(top)}


def _update_table(sequence: Sequence, updates: tuple[list[int], list[int], list[int]]) -> None:
    """Append the blocks that the runner does not have yet to `updates`."""
    rows, positions, blocks = updates
    table, first = sequence.block_table, sequence.num_sent_blocks
    assert sequence.row is not None
    rows += [sequence.row] * (len(table) - first)
    positions += range(first, len(table))
    blocks += table[first:]
    sequence.num_sent_blocks = len(table)


def _array(values: abc.Sequence[object]) -> IntArray:
    return np.array(values, np.int32)
