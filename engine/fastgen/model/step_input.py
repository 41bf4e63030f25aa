"""The input of one step: what the scheduler decided, as arrays for a runner.

A runner keeps state between steps: a row for each running sequence, with its block table, its sampling parameters and
the token sampled last. A `StepInput` holds only what the runner cannot know yet, so its size depends on the tokens of
the step and not on their contexts.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastgen.core.blocks.state_pool import NO_STATE
from fastgen.core.sequence import UNKNOWN, RowParameters, Sequence
from fastgen.core.step_plan import StepPlan

IntArray = npt.NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)

_NONE = np.zeros(0, np.int32)
_NO_SWAPS = np.zeros((0, 2), np.int32)
_NO_SAVES = np.zeros((0, 3), np.int32)
_NO_UPDATES = np.zeros((3, 0), np.int32)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step with T tokens of S sequences; the first `num_decodes` sequences have one token each.

    All arrays are int32. Tokens of one sequence are adjacent and in order, and sequences follow one another without
    padding. Apply the updates in the order of the attributes.

    Attributes:
        swap_out: [n, 2], (cache block, host block) pairs to copy to the host buffer.
        swap_in: [n, 2], pairs to copy back.
        new_rows: parameters of the rows that sequences get in this step, without pooled sequences. What these rows
            held before is void.
        table_updates: [3, n], new entries of block tables: row, position in the table, block.
        rows: [S], row of each sequence.
        query_starts: [S + 1], index of each sequence's first token, then T.
        seq_lens: [S], number of tokens of each sequence with KV in the cache after this step.
        token_ids: [T]; -1 stands for the token sampled last for the row.
        slot_mapping: [T], cache slot of each token's key and value: block * block size + offset.
        window_updates, window_slots: as `table_updates` and `slot_mapping`, for layers with a sliding window that have
            blocks of their own; empty for a model without them. Entries of blocks that the window has left are never
            sent: what the runner has there is arbitrary, and not attended to.
        sampled: [N], sequences that sample a token, as indices of `rows`.
        masked: [M], those of them that need a grammar's mask, as indices of `sampled`.
        scored_tokens: [P], indices of tokens after which the logprob of another token is requested.
        scored_targets: [P], that other token: the next one of the prompt, or one of `Pooling.token_ids`.
        scored_top: [P], number of most likely tokens to report beside it.
        state_slots: [S], slot of each sequence's recurrent states after this step; empty for a model without them.
        state_sources: [S], slot of its states before this step, or -1 if it has no computed tokens.
        state_saves: [n, 3], further slots to copy states to: index of the sequence, number of its tokens in this step
            before them, slot. No slot is written twice, nor written and read by another sequence.
        pooled: [G], sequences whose hidden states are pooled, as indices of `rows`.
        pooled_starts: [G + 1], index of each one's first token in `pooled_tokens`, then Q.
        pooled_tokens: [Q], indices of the tokens whose hidden states are added up.
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
    window_updates: IntArray
    window_slots: IntArray
    state_slots: IntArray
    state_sources: IntArray
    state_saves: IntArray
    sampled: IntArray
    masked: IntArray
    scored_tokens: IntArray
    scored_targets: IntArray
    scored_top: IntArray
    pooled: IntArray
    pooled_starts: IntArray
    pooled_tokens: IntArray
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)


class BlockTables:
    """The block table of each row, as an array that grows.

    Attributes:
        blocks: [rows, positions], the block at each position; entries that were never set are arbitrary.
    """

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self.blocks = np.zeros((1, 1), dtype)

    def update(self, updates: IntArray) -> None:
        """Apply `StepInput.table_updates`, or `StepInput.window_updates`."""
        if updates.size:
            rows, positions, blocks = updates
            self.blocks = enlarged(self.blocks, int(rows.max()) + 1, int(positions.max()) + 1)
            self.blocks[rows, positions] = blocks


class StepInputBuilder:
    """Assigns rows to sequences, and builds the input of each step.

    Steps must reach the runner in the order in which they are built. A row can be given to another sequence while a
    step in flight still computes it: runners apply updates in the order of steps.

    Args:
        block_size: tokens of a block.
        has_window: whether layers with a sliding window have blocks of their own.
    """

    def __init__(self, block_size: int, *, has_window: bool = False) -> None:
        self._block_size = block_size
        self._free: list[int] = []
        self._num_rows = 0
        self._tables = BlockTables(np.int32)  # as the runner has them
        self._window_tables = BlockTables(np.int32) if has_window else None
        self._constrained = np.zeros(1, np.bool_)  # of each row, whether its sequence has a grammar

    def build(self, plan: StepPlan) -> StepInput:
        """Return the input for `plan`."""
        for sequence in plan.preempted:
            self.release(sequence)
        new_rows, updates, window_updates = self._update_rows(plan.sequences[plan.num_continued :])
        self._tables.update(updates)
        rows = _column([sequence.row for sequence in plan.sequences])
        starts, ends = _column(plan.starts), _column(plan.ends)
        counts = ends - starts
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        num_decodes = int(np.count_nonzero(counts == 1))
        assert query_starts[num_decodes] == num_decodes, "chunks of one token must come first"
        window_slots = _NONE
        if self._window_tables is not None:
            self._window_tables.update(window_updates)
            window_slots = self._slots(self._window_tables, rows, starts, counts, query_starts)
        sampled = _indices(np.frombuffer(bytes(plan.samples), np.bool_))
        scored_tokens, scored_targets, scored_top = _scored(plan, query_starts)
        pooled, pooled_starts, pooled_tokens = _pooled(plan, query_starts)
        state_slots, state_sources, state_saves = _states(plan)
        return StepInput(
            swap_out=_array(plan.swap_out).reshape(-1, 2) if plan.swap_out else _NO_SWAPS,
            swap_in=_array(plan.swap_in).reshape(-1, 2) if plan.swap_in else _NO_SWAPS,
            new_rows=tuple(new_rows),
            table_updates=updates,
            rows=rows,
            query_starts=query_starts,
            seq_lens=ends,
            token_ids=_token_ids(plan, query_starts),
            slot_mapping=self._slots(self._tables, rows, starts, counts, query_starts),
            window_updates=window_updates,
            window_slots=window_slots,
            state_slots=state_slots,
            state_sources=state_sources,
            state_saves=state_saves,
            sampled=sampled,
            masked=_indices(self._constrained[rows[sampled]]),
            scored_tokens=scored_tokens,
            scored_targets=scored_targets,
            scored_top=scored_top,
            pooled=pooled,
            pooled_starts=pooled_starts,
            pooled_tokens=pooled_tokens,
            num_decodes=num_decodes,
        )

    def release(self, sequence: Sequence) -> None:
        """Take back the row of a sequence that has ended or was preempted, if it has one."""
        if sequence.row is not None:
            self._free.append(sequence.row)
            sequence.row = None
            sequence.resend_blocks(0)

    def _update_rows(self, sequences: abc.Sequence[Sequence]) -> tuple[list[RowParameters], IntArray, IntArray]:
        """Give rows to sequences that have none.

        Return `StepInput.new_rows`, `StepInput.table_updates` and `StepInput.window_updates`.
        """
        windows: list[tuple[int, int, int]] = []
        new_rows: list[RowParameters] = []
        rows: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            table, first = sequence.block_table, sequence.num_sent_blocks
            if first == len(table):  # it has a row: no sequence is scheduled without blocks
                continue
            if sequence.row is None:
                sequence.row = self._take_row(sequence)
                if sequence.pooling is None:
                    new_rows.append(_parameters(sequence, sequence.row))
            rows += [sequence.row] * (len(table) - first)
            positions += range(first, len(table))
            blocks += table[first:]
            if self._window_tables is not None:
                held = range(max(first, sequence.num_left_blocks), len(table))
                windows += [(sequence.row, place, sequence.window_table[place]) for place in held]
            sequence.num_sent_blocks = len(table)
        window_updates = np.ascontiguousarray(_array(windows).T) if windows else _NO_UPDATES
        return new_rows, _array((rows, positions, blocks)), window_updates

    def _take_row(self, sequence: Sequence) -> int:
        if not self._free:
            self._free.append(self._num_rows)
            self._num_rows += 1
            self._constrained = enlarged(self._constrained, self._num_rows)
        row = self._free.pop()
        self._constrained[row] = sequence.constraint is not None
        return row

    def _slots(
        self, tables: BlockTables, rows: IntArray, starts: IntArray, counts: IntArray, query_starts: IntArray
    ) -> IntArray:
        """Return the cache slots of all tokens."""
        if query_starts[-1] > len(rows):
            offsets = np.arange(query_starts[-1], dtype=np.int32)
            rows, starts = np.repeat(rows, counts), np.repeat(starts - query_starts[:-1], counts) + offsets
        columns, offsets = np.divmod(starts, self._block_size)
        slots: IntArray = tables.blocks[rows, columns] * self._block_size + offsets
        return slots


def enlarged(array: npt.NDArray[Scalar], *shape: int) -> npt.NDArray[Scalar]:
    """Return `array` if it has this shape or a larger one, otherwise a copy.

    The copy is filled up with zeros. A dimension that grows at least doubles, so that growth is rare.
    """
    if all(have >= needed for have, needed in zip(array.shape, shape, strict=True)):
        return array
    grown = np.zeros(
        [have if have >= needed else max(needed, 2 * have) for have, needed in zip(array.shape, shape, strict=True)],
        array.dtype,
    )
    grown[tuple(slice(have) for have in array.shape)] = array
    return grown


def _parameters(sequence: Sequence, row: int) -> RowParameters:
    known = len(sequence.tokens) - (sequence.tokens[-1] == UNKNOWN)  # this step may sample the last one
    return RowParameters(row, sequence.sampling, sequence.seed, sequence.num_prompt_tokens, sequence.tokens[:known])


def _token_ids(plan: StepPlan, query_starts: IntArray) -> IntArray:
    """Return the ids of all tokens.

    The tokens of continued sequences are `UNKNOWN`: the runner has them.
    """
    token_ids = np.full(query_starts[-1], UNKNOWN, np.int32)
    for index in range(plan.num_continued, len(plan.sequences)):
        tokens = plan.sequences[index].tokens[plan.starts[index] : plan.ends[index]]
        token_ids[query_starts[index] : query_starts[index + 1]] = tokens
    return token_ids


def _scored(plan: StepPlan, query_starts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the scored tokens, their targets and numbers of most likely tokens; see `StepInput`."""
    tokens: list[int] = []
    targets: list[int] = []
    top: list[int] = []
    for index in range(plan.num_continued, len(plan.sequences)):
        sequence, start = plan.sequences[index], plan.starts[index]
        end = min(plan.ends[index], sequence.num_prompt_tokens - 1)
        if sequence.sampling.prompt_logprobs is not None and start < end:
            first = int(query_starts[index])
            tokens += range(first, first + end - start)
            targets += sequence.tokens[start + 1 : end + 1]
            top += [sequence.sampling.prompt_logprobs] * (end - start)
        pooling = sequence.pooling
        if pooling is not None and pooling.method == "logprobs" and plan.ends[index] == len(sequence.tokens):
            tokens += [int(query_starts[index + 1]) - 1] * len(pooling.token_ids)
            targets += pooling.token_ids
            top += [0] * len(pooling.token_ids)
    return _array(tokens), _array(targets), _array(top)


def _states(plan: StepPlan) -> tuple[IntArray, IntArray, IntArray]:
    """Return the slots of recurrent states, their sources and the copies to make; see `StepInput`."""
    if not plan.sequences or plan.sequences[0].state_slot is None:
        return _NONE, _NONE, _NO_SAVES
    slots = [sequence.state_slot for sequence in plan.sequences]
    sources = [
        plan.state_sources.get(sequence, slot) if start else NO_STATE
        for sequence, slot, start in zip(plan.sequences, slots, plan.starts, strict=True)
    ]
    if not plan.state_saves:
        return _column(slots), _column(sources), _NO_SAVES
    index = {sequence: number for number, sequence in enumerate(plan.sequences)}
    saves = [
        (index[save.sequence], save.num_tokens - plan.starts[index[save.sequence]], save.slot)
        for save in plan.state_saves
    ]
    return _column(slots), _column(sources), _array(saves)


def _pooled(plan: StepPlan, query_starts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the pooled sequences, where their tokens start, and the tokens to add up; see `StepInput`."""
    pooled: list[int] = []
    starts: list[int] = [0]
    tokens: list[int] = []
    for index in range(plan.num_continued, len(plan.sequences)):
        pooling = plan.sequences[index].pooling
        if pooling is None or pooling.method == "logprobs":
            continue
        end = int(query_starts[index + 1])
        first = int(query_starts[index]) if pooling.method == "mean" else end - 1
        if pooling.method == "mean" or plan.ends[index] == len(plan.sequences[index].tokens):
            pooled.append(index)
            tokens += range(first, end)
            starts.append(len(tokens))
    return _array(pooled), _array(starts), _array(tokens)


def _indices(flags: npt.NDArray[np.bool_]) -> IntArray:
    return np.flatnonzero(flags).astype(np.int32)


def _column(values: list[Any]) -> IntArray:
    return np.fromiter(values, np.int32, len(values))


def _array(values: abc.Sequence[object]) -> IntArray:
    return np.array(values, np.int32)
