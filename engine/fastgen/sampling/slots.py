"""Sampling state of the running sequences on the device.

Each sequence has a slot, which is written when the sequence is admitted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.sequence import RowParameters
from fastgen.kernels.gpu.sampling.columns import Column, IntArray
from fastgen.kernels.gpu.transfers import upload
from fastgen.sampling.parameters import bans_of, bias_of, columns_of, is_penalised

_FIRST_LIST_CAPACITY = 1024
_FIRST_COUNT_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Admission:
    """The writes of the next flush for one slot.

    Attributes:
        columns: [len(Column)].
        segment, lists: the places in `SamplingSlots.lists`, and the values to write there.
        count_row, tokens, counts: row of `SamplingSlots.counts` or -1, and its elements that are not 0.
    """

    columns: IntArray
    segment: range
    lists: IntArray
    count_row: int
    tokens: IntArray
    counts: IntArray


class SamplingSlots:
    """Parameters, lists, token counts and last tokens of each slot, on the device.

    Args:
        vocab_size: number of logits of a row, V.
        max_rows: number of slots.
        device: of the logits.
        end_tokens: the model's end-of-sequence tokens.

    `admit` and `release` work on the host; `flush` uploads what was admitted since, in one copy. From then on the
    kernels keep the state up to date, so that a step does no work proportional to the lengths of its sequences.

    Attributes:
        columns: [max_rows, len(Column)] int64, see `Column`.
        last_tokens: [max_rows] int32, the token sampled last; written by the kernels.
        lists: [n] int32, segments of the slots with biases, banned tokens or bad words. Replaced by one of twice the
            size when it is full.
        counts: [n, V] int32, see `process_logits`; a row for each slot with a penalty. Replaced likewise, up to
            `max_rows` rows.
        has_lists: [max_rows] on the host, whether the sequence admitted last has a segment of `lists` or a row of
            `counts`. The kernels need neither for the other slots.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, end_tokens: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._end_tokens = frozenset(token for token in end_tokens if token < vocab_size)
        self.columns = torch.zeros(max_rows, len(Column), dtype=torch.int64, device=device)
        self.columns[:, Column.COUNT_ROW] = -1
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.lists = torch.zeros(_FIRST_LIST_CAPACITY, dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.has_lists = np.zeros(max_rows, np.bool_)
        self._segments = _Segments(_FIRST_LIST_CAPACITY)
        self._free_count_rows: list[int] = []
        self._of_slot: dict[int, tuple[range, int]] = {}  # its segment, and its row of `counts` or -1
        self._pending: dict[int, _Admission] = {}

    def admit(self, new: RowParameters) -> None:
        """Give slot `new.row` to a sequence. Call it again after a preemption, with all tokens.

        Raises:
            torch.OutOfMemoryError: if the device has no memory for more lists or counts. The slot is free then.
        """
        assert 0 <= new.row < self._max_rows
        self.release(new.row)
        columns = columns_of(new, self._vocab_size)
        lists = _add_lists(columns, new, self._end_tokens)
        count_row = self._take_count_row() if is_penalised(new.sampling) else -1
        try:
            segment = self._take_segment(len(lists))
        except torch.OutOfMemoryError:
            self._give_back(range(0), count_row)
            raise
        columns[[Column.BIASES, Column.BANS, Column.RING]] += segment.start
        columns[Column.COUNT_ROW] = count_row
        tokens, counts = _token_counts(new) if count_row >= 0 else (_NONE, _NONE)
        self.has_lists[new.row] = len(lists) > 0 or count_row >= 0
        self._of_slot[new.row] = (segment, count_row)
        self._pending[new.row] = _Admission(columns, segment, lists, count_row, tokens, counts)

    def release(self, slot: int) -> None:
        """Free the memory of `slot`, if it has any."""
        self._pending.pop(slot, None)
        held = self._of_slot.pop(slot, None)
        if held is not None:
            self._give_back(*held)

    def flush(self) -> None:
        """Write the slots admitted since the last flush, if any: one upload and a few launches."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        admissions = pending.values()
        parts = (
            np.array(list(pending), np.int64),
            np.concatenate([admission.columns for admission in admissions]),
            np.concatenate([np.arange(a.segment.start, a.segment.stop) for a in admissions]),
            np.concatenate([admission.lists for admission in admissions]),
            np.array([admission.count_row for admission in admissions if admission.count_row >= 0], np.int64),
            np.concatenate([a.count_row * self._vocab_size + a.tokens for a in admissions]),
            np.concatenate([admission.counts for admission in admissions]),
        )
        slots, columns, places, lists, count_rows, flat, counts = torch.split(
            upload(np.concatenate(parts), self._device), [len(part) for part in parts]
        )
        self.columns.index_copy_(0, slots, columns.view(-1, len(Column)))
        if len(places):
            self.lists.index_copy_(0, places, lists.int())
        if len(count_rows):
            self.counts.index_fill_(0, count_rows, 0)
            self.counts.view(-1).index_copy_(0, flat, counts.int())

    def _take_segment(self, size: int) -> range:
        segment = self._segments.take(size)
        while segment is None:
            self.lists = torch.cat([self.lists, torch.zeros_like(self.lists)])
            self._segments.extend(len(self.lists))
            segment = self._segments.take(size)
        return segment

    def _take_count_row(self) -> int:
        if not self._free_count_rows:
            before = len(self.counts)
            after = min(max(2 * before, _FIRST_COUNT_ROWS), self._max_rows)
            counts = self.counts.new_empty(after, self._vocab_size)
            counts[:before] = self.counts
            self.counts = counts
            self._free_count_rows = list(range(after - 1, before - 1, -1))
        return self._free_count_rows.pop()

    def _give_back(self, segment: range, count_row: int) -> None:
        self._segments.give_back(segment)
        if count_row >= 0:
            self._free_count_rows.append(count_row)


_NONE: IntArray = np.zeros(0, np.int64)


def _add_lists(columns: IntArray, new: RowParameters, end_tokens: frozenset[int]) -> IntArray:
    """Return the lists of a sequence, and set the columns that are offsets into them; see `Column`."""
    biased, biases = bias_of(new.sampling)
    order = np.argsort(biased, kind="stable")
    bans, generated = bans_of(new, end_tokens), new.tokens[new.num_prompt_tokens :]
    words = [preceding or [] for _, preceding in bans]
    offsets = 4 * len(bans) + np.cumsum([0, *map(len, words)])
    ring_length = max(map(len, words), default=0)
    ring = np.zeros(ring_length, np.int64)
    for index in range(max(0, len(generated) - ring_length), len(generated)):
        ring[index % ring_length] = generated[index]
    parts: tuple[npt.ArrayLike, ...] = (
        biased[order],
        biases[order].view(np.int32),
        [token for token, _ in bans],
        [-1 if preceding is None else len(preceding) for _, preceding in bans],
        offsets[:-1],
        [0] * len(bans),
        [token for word in words for token in word],
        ring,
    )
    columns[Column.NUM_BIASES] = len(order)
    columns[Column.BANS] = 2 * len(order)
    columns[Column.NUM_BANS] = len(bans)
    columns[Column.RING] = 2 * len(order) + offsets[-1]
    columns[Column.RING_LENGTH] = ring_length
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _token_counts(new: RowParameters) -> tuple[IntArray, IntArray]:
    """Return the distinct tokens [n] of a sequence and their elements of `SamplingSlots.counts` [n]."""
    tokens, places = np.unique(np.array(new.tokens, np.int64), return_inverse=True)
    of_prompt, generated = places[: new.num_prompt_tokens], places[new.num_prompt_tokens :]
    in_prompt = np.bincount(of_prompt, minlength=len(tokens)) > 0
    return tokens, 2 * np.bincount(generated, minlength=len(tokens)) + in_prompt


class _Segments:
    """First-fit allocator of segments of a list."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = [range(capacity)]

    def take(self, size: int) -> range | None:
        """Return a free segment, or None if there is none of this size."""
        if size == 0:
            return range(0)
        for index, free in enumerate(self._free):
            if len(free) >= size:
                self._free[index] = free[size:]
                return free[:size]
        return None

    def give_back(self, segment: range) -> None:
        """Free a segment, and join it with its neighbours."""
        free: list[range] = []
        for part in sorted([*self._free, segment], key=lambda part: part.start):
            if not part:
                continue
            if free and free[-1].stop == part.start:
                free[-1] = range(free[-1].start, part.stop)
            else:
                free.append(part)
        self._free = free

    def extend(self, capacity: int) -> None:
        """Add free elements, up to a list of `capacity` elements."""
        added = range(self._capacity, capacity)
        self._capacity = capacity
        self.give_back(added)
