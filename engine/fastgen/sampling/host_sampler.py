"""Sample the next token of each row, with the state of the rows on the host.

Sampling parameters apply in this order, which is the order of transformers and vLLM where they agree:

1. logit_bias, then repetition, frequency and presence penalties;
2. masks: tokens that the grammar forbids, then bans: end and stop tokens before min_tokens, and bad words. Where bans
   would leave no token, they are ignored;
3. greedy: the largest logit; otherwise temperature and filters, then a random draw.

Random numbers are counter-based, keyed by (seed, position): the same seed gives the same tokens regardless of the rest
of the batch, also after a preemption. Log-probabilities are those of the unmodified logits.

The logits are processed by functions of `fastgen.kernels.gpu.sampling` that run on any device. Only rows whose logits
change are copied, and a penalty costs the distinct tokens of its sequence, not the vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.sequence import RowParameters
from fastgen.core.step_output import TokenLogprobs
from fastgen.kernels.gpu.sampling.changes import Changes, Mask, change_logits, is_banned
from fastgen.kernels.gpu.sampling.columns import Column, IntArray, take_rows
from fastgen.kernels.gpu.sampling.top_k_top_p import choose_tokens
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE
from fastgen.sampling.logprobs import token_logprobs
from fastgen.sampling.parameters import bans_of, bias_of, columns_of, is_penalised

Indices = npt.NDArray[np.integer]

_FIRST_CAPACITY = 64


class HostSampler:
    """Samples tokens for the sequences in the rows. The next sequence of a row replaces its state.

    Args:
        vocab_size: number of logits of a row.
        end_tokens: the model's end-of-sequence tokens.
    """

    def __init__(self, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._end_tokens = frozenset(token for token in end_tokens if token < vocab_size)
        self._columns = np.zeros((1, len(Column)), np.int64)  # [rows, len(Column)]
        self._changing: dict[int, _ChangingRow] = {}  # rows with biases, penalties or bans
        self._num_top: dict[int, int] = {}  # rows with logprobs, and how many top tokens each requested

    def admit(self, new: RowParameters) -> None:
        """Give row `new.row` to a sequence. Call it again after a preemption, with all tokens."""
        row, sampling = new.row, new.sampling
        if row >= len(self._columns):
            self._columns = np.pad(self._columns, ((0, row + 1), (0, 0)))  # at least twice as many
        self._columns[row] = columns_of(new, self._vocab_size)
        bans = bans_of(new, self._end_tokens)
        self._changing.pop(row, None)
        if sampling.logit_bias or bans or is_penalised(sampling):
            self._changing[row] = _ChangingRow(new, bans)
        self._num_top.pop(row, None)
        if sampling.logprobs is not None:
            self._num_top[row] = sampling.logprobs

    def sample(
        self, logits: torch.Tensor, rows: Indices, positions: Indices, masks: abc.Mapping[int, Mask] | None = None
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return a token for each row, and by index the log-probabilities of those that requested them.

        Greedy resolves ties to the smallest token id.

        Args:
            logits: [R, V] of any floating type, on any device; not modified.
            rows: [R], without repetition.
            positions: [R], position of the token to sample in its sequence: the number of its tokens.
            masks: masks of rows with a grammar, by index in `rows`; see `Changes`.
        """
        if not len(rows):
            return [], {}
        parameters = self._columns[rows]
        numbers: list[int] = rows.tolist()
        changes = self._changes(numbers, masks or {})
        if not changes:
            sampled = _choose(logits, parameters, positions)
        elif len(changes) == len(rows) <= ROWS_SAMPLED_AT_ONCE:
            sampled = _choose_changed(logits, parameters, positions, list(changes.values()))
        else:
            sampled = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
            unchanged = [index for index in range(len(rows)) if index not in changes]
            if unchanged:
                sampled[unchanged] = _choose(take_rows(logits, unchanged), parameters[unchanged], positions[unchanged])
            for some in row_slices(list(changes), ROWS_SAMPLED_AT_ONCE):
                own = [changes[index] for index in some]
                sampled[some] = _choose_changed(take_rows(logits, some), parameters[some], positions[some], own)
        tokens: list[int] = sampled.tolist()
        if self._changing:
            for row, token in zip(numbers, tokens, strict=True):
                if row in self._changing:
                    self._changing[row].append(token)
        return tokens, self._logprobs(logits, numbers, tokens) if self._num_top else {}

    def _changes(self, rows: list[int], masks: abc.Mapping[int, Mask]) -> dict[int, Changes]:
        """Return what changes logits in this step, by index in `rows`, ascending."""
        if not self._changing and not masks:
            return {}
        changes = {}
        for index, row in enumerate(rows):
            state, mask = self._changing.get(row), masks.get(index)
            change = Changes(mask=mask) if state is None else state.changes(mask)
            if any(part is not None for part in change):
                changes[index] = change
        return changes

    def _logprobs(self, logits: torch.Tensor, rows: list[int], tokens: list[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        wanted = [index for index, row in enumerate(rows) if row in self._num_top]
        for some in row_slices(wanted, ROWS_SAMPLED_AT_ONCE):
            top = [self._num_top[rows[index]] for index in some]
            scored = token_logprobs(take_rows(logits, some), [tokens[index] for index in some], top)
            found |= zip(some, scored, strict=True)
        return found


def _choose(logits: torch.Tensor, parameters: IntArray, positions: Indices) -> torch.Tensor:
    return choose_tokens(logits, parameters, positions, rows_at_once=ROWS_SAMPLED_AT_ONCE)


def _choose_changed(
    logits: torch.Tensor, parameters: IntArray, positions: Indices, changes: abc.Sequence[Changes]
) -> torch.Tensor:
    """Choose tokens [R] from changed logits."""
    scores = logits.to(torch.float32, copy=True)
    change_logits(scores, parameters, changes)
    return _choose(scores, parameters, positions)


class _ChangingRow:
    """The state of a row whose logits may change before a token is chosen."""

    __slots__ = ("_bans", "_bias", "_generated", "_history", "_min_tokens")

    def __init__(self, new: RowParameters, bans: list[tuple[int, list[int] | None]]) -> None:
        self._bias = bias_of(new.sampling) if new.sampling.logit_bias else None
        self._bans = bans
        self._min_tokens = new.sampling.min_tokens
        self._generated = new.tokens[new.num_prompt_tokens :]
        self._history = TokenHistory(new) if is_penalised(new.sampling) else None

    def changes(self, mask: Mask | None) -> Changes:
        """Return what changes the logits of the next token."""
        generated, seen = self._generated, self._history
        banned = [
            token
            for token, preceding in self._bans
            if is_banned(preceding, generated, len(generated), self._min_tokens)
        ]
        return Changes(self._bias, None if seen is None else (seen.ids, seen.counts), banned or None, mask)

    def append(self, token: int) -> None:
        """Record the token that was sampled."""
        self._generated.append(token)
        if self._history is not None:
            self._history.append(token)


class TokenHistory:
    """The distinct tokens of one sequence that penalties concern, and how often each was generated."""

    __slots__ = ("_ids_and_counts", "_index")

    def __init__(self, new: RowParameters) -> None:
        self._index: dict[int, int] = {}  # of a token in `ids`
        self._ids_and_counts = np.zeros((2, _FIRST_CAPACITY), np.int64)
        # Only the repetition penalty includes the prompt.
        if new.sampling.repetition_penalty != 1:
            for token in new.tokens[: new.num_prompt_tokens]:
                self._add(token, 0)
        for token in new.tokens[new.num_prompt_tokens :]:
            self.append(token)

    @property
    def ids(self) -> IntArray:
        """Distinct tokens [n] in order of first occurrence."""
        return self._ids_and_counts[0, : len(self._index)]

    @property
    def counts(self) -> IntArray:
        """How often each of `ids` was generated [n]; 0 for tokens that only the prompt contains."""
        return self._ids_and_counts[1, : len(self._index)]

    def append(self, token: int) -> None:
        """Count a generated token."""
        self._add(token, 1)

    def _add(self, token: int, count: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == self._ids_and_counts.shape[1]:
            self._ids_and_counts = np.pad(self._ids_and_counts, ((0, 0), (0, index)))
        self._ids_and_counts[0, index] = token
        self._ids_and_counts[1, index] += count


def row_slices(rows: list[int], size: int) -> Iterator[list[int]]:
    """Yield `rows` in lists of at most `size`."""
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
