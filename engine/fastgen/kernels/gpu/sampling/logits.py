"""Operator that applies biases, penalties, bans and grammar masks to logits.

Each row of the batch has its own parameters. A running sequence owns a *slot*: a row of `columns` with its parameters,
a segment of `lists` with its biases, banned tokens and bad words, and, if it has a penalty, a row of `counts`. A step
calls `process_logits`, then `sample_tokens` and `commit_tokens` (`tokens.py`): five launches, whose grids depend on the
shape of the logits alone.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import torch

from fastgen.kernels.gpu.operators import operator

# Tokens of a chunk, for which one program computes scores, and of a group, of which it records the largest score.
CHUNK, GROUP = 4096, 32


class Column(IntEnum):
    """Columns of the parameters of a slot, int64. The first seven hold the bits of a float64.

    Their names are those of fields of `SamplingParams`.

    Offsets count elements of `lists`. A slot's segment holds, in this order:

    - at BIASES, NUM_BIASES tokens in ascending order, then their biases (bits of float32);
    - at BANS, NUM_BANS tokens in ascending order, each an end token of the model or the last token of a bad word; then
      for each the number of tokens that precede it in the bad word, or -1 for an end token; then the offset of these
      preceding tokens from BANS; then whether the token is banned in this step; then all preceding tokens;
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


@operator(mutates=("lists",))
def process_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `logits` with bias, penalties, banned tokens and grammar masks applied, in this order.

    Banned tokens are the end tokens before `min_tokens` are generated, and tokens that would complete a bad word. If a
    row's mask and bans would leave it no token, its bans are ignored: the grammar takes precedence.

    Args:
        logits: [R, V], float32, bfloat16 or float16; not modified.
        slots: [R] int32; -1 for padded rows, whose scores are unspecified.
        positions: [R] int32, position in its sequence of the token to sample.
        columns: [slots, len(Column)] int64.
        lists: [n] int32. Written: whether each banned token is banned in this step.
        counts: [count rows, V] int32: twice the number of times that a token was generated, plus one if the token is in
            the prompt.
        masks: [M, ceil(V / 32)] int32 or None: bit i % 32 of word i // 32 is set if token i is allowed.
        mask_rows: [R] int32, row of `masks` for each row, or -1; None if and only if `masks` is.

    Returns:
        What `sample_tokens` needs of R rows over V tokens, in C chunks.

        - scores [R, V] float32;
        - chunk_max [R, C] float32, largest score of a chunk;
        - chunk_sum [R, C] float64, sum of exp((score - chunk_max) / temperature); 0 in greedy rows and if all scores
          are minus infinity;
        - group_max [R, C * CHUNK / GROUP] float32, largest score of a group; minus infinity beyond the vocabulary.
    """
    num_rows, vocabulary = logits.shape
    scores = logits.to(torch.float32, copy=True)
    temperatures = torch.zeros(num_rows)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        parameters = parameters_of(columns, slot)
        temperatures[row] = parameters[Column.TEMPERATURE]
        _add_biases(scores[row], parameters, lists)
        if parameters[Column.COUNT_ROW] >= 0:
            _penalise(scores[row], parameters, counts[parameters[Column.COUNT_ROW]])
        if masks is not None and mask_rows is not None and mask_rows[row] >= 0:
            tokens = torch.arange(vocabulary)
            allowed = (masks[mask_rows[row]][tokens // 32] >> (tokens % 32)) & 1
            scores[row, allowed == 0] = -math.inf
        banned = _update_bans(parameters, lists, position)
        without = scores[row].index_fill(0, banned, -math.inf)
        if (without == -math.inf).all():
            _bans(parameters, lists)[3] = 0
        else:
            scores[row] = without
    missing = -vocabulary % CHUNK
    chunks = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
    chunks = chunks.view(num_rows, (vocabulary + missing) // CHUNK, CHUNK)
    chunk_max = chunks.amax(-1)
    weights = ((chunks - chunk_max[..., None]) / temperatures[:, None, None]).exp()
    chunk_sum = weights.where((chunk_max > -math.inf)[..., None], 0.0).sum(-1, dtype=torch.float64)
    chunk_sum = chunk_sum.where(temperatures[:, None] > 0, 0.0)
    return scores, chunk_max, chunk_sum, chunks.view(num_rows, (vocabulary + missing) // GROUP, GROUP).amax(-1)


def parameters_of(columns: torch.Tensor, slot: int) -> list[Any]:
    """Return the parameters of one slot on the host, by column."""
    row = columns[slot]
    return [*row[:FLOAT_COLUMNS].view(torch.float64).tolist(), *row[FLOAT_COLUMNS:].tolist()]


def _add_biases(scores: torch.Tensor, parameters: list[Any], lists: torch.Tensor) -> None:
    first, count = parameters[Column.BIASES], parameters[Column.NUM_BIASES]
    tokens, biases = lists[first : first + 2 * count].view(2, count)
    scores.index_add_(0, tokens, biases.view(torch.float32))


def _penalise(scores: torch.Tensor, parameters: list[Any], counts: torch.Tensor) -> None:
    repetition, presence, frequency = (
        scores.new_tensor(parameters[column])
        for column in (Column.REPETITION_PENALTY, Column.PRESENCE_PENALTY, Column.FREQUENCY_PENALTY)
    )
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores.copy_(torch.where(counts > 0, repeated, scores))
    generated = counts >> 1
    scores -= frequency * generated.float()
    scores -= presence * (generated > 0)


def _bans(parameters: list[Any], lists: torch.Tensor) -> torch.Tensor:
    """Return the four lists [4, NUM_BANS] of a slot's banned tokens, as a view."""
    first, count = parameters[Column.BANS], parameters[Column.NUM_BANS]
    return lists[first : first + 4 * count].view(4, count)


def _update_bans(parameters: list[Any], lists: torch.Tensor, position: int) -> torch.Tensor:
    """Record which tokens are banned at `position`, and return them [n]."""
    bans = _bans(parameters, lists)
    num_generated = position - parameters[Column.NUM_PROMPT_TOKENS]
    ring, ring_length = parameters[Column.RING], parameters[Column.RING_LENGTH]
    last = [
        int(lists[ring + index % ring_length]) for index in range(max(0, num_generated - ring_length), num_generated)
    ]
    for index, (length, word) in enumerate(bans[1:3].T.tolist()):
        if length < 0:
            bans[3, index] = num_generated < parameters[Column.MIN_TOKENS]
        else:
            first = parameters[Column.BANS] + word
            before = lists[first : first + length].tolist()
            bans[3, index] = length <= num_generated and last[len(last) - length :] == before
    return bans[0][bans[3] != 0].long()
