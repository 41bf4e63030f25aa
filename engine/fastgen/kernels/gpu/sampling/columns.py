"""The parameters of the rows that are sampled.

A running sequence owns a *slot*: a row of `columns` with its parameters, a segment of `lists` with its biases, banned
tokens and bad words, and, if it has a penalty, a row of `counts`. The sampler of the CPU has only the columns.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Column(IntEnum):
    """Columns of the parameters of a slot, int64. The first seven hold the bits of a float64.

    Their names are those of fields of `SamplingParams`.

    Offsets count elements of `lists`. A slot's segment holds, in this order:

    - at BIASES, NUM_BIASES tokens in ascending order, then their biases (bits of float32);
    - at BANS, NUM_BANS tokens in ascending order, each an end or stop token or the last token of a bad word; then for
      each the number of tokens that precede it in the bad word, or -1 for an end or stop token; then the offset of
      these preceding tokens from BANS; then whether the token is banned in this step; then all preceding tokens;
    - at RING, the last RING_LENGTH generated tokens: token i of the generation is at i modulo RING_LENGTH.
    """

    TEMPERATURE = 0  # 0 is greedy
    TOP_P = 1
    MIN_P = 2
    TYPICAL_P = 3
    REPETITION_PENALTY = 4
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    SEED = 7
    TOP_K = 8  # 0 keeps all
    NUM_PROMPT_TOKENS = 9
    MIN_TOKENS = 10
    COUNT_ROW = 11  # row of `counts`, or -1
    BIASES = 12
    NUM_BIASES = 13
    BANS = 14
    NUM_BANS = 15
    RING = 16
    RING_LENGTH = 17


FLOAT_COLUMNS = 7
# Columns that are shares of the probability.
PROBABILITY_COLUMNS = (Column.TOP_P, Column.TYPICAL_P)


def of_column(parameters: IntArray, column: Column) -> FloatArray:
    """Return one of the first columns of `parameters` [R, len(Column)] as the float64 numbers [R] that it holds."""
    return parameters[:, column].view(np.float64)


def take_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return ascending, non-empty `rows` of `logits`, as a view if they are contiguous."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]


def used_rows(slots: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the rows that are not padding, and their slots."""
    used = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot >= 0]
    return [row for row, _ in used], [slot for _, slot in used]
