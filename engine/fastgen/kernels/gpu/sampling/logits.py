"""Operator that applies biases, penalties, bans and grammar masks to logits.

Each row of the batch has its own parameters (`columns.py`). A step calls `process_logits`, then `sample_tokens` and
`commit_tokens` (`tokens.py`): five launches, whose grids depend on the shape of the logits alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels.gpu.operators import operator
from fastgen.kernels.gpu.sampling.changes import Changes, Mask, change_logits, is_banned
from fastgen.kernels.gpu.sampling.columns import Column, of_column, used_rows

# Tokens of a chunk, for which one program computes scores, and of a group, of which it records the largest score.
CHUNK, GROUP = 4096, 32


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `logits` with bias, penalties, grammar masks and bans applied, in this order.

    Banned tokens are end and stop tokens before `min_tokens` are generated, and tokens that would complete a bad word.
    If a row's mask and bans would leave it no token, its bans are ignored: the grammar takes precedence.

    Args:
        logits: [R, V], float32, bfloat16 or float16; not modified.
        slots: [R] int32; -1 for padded rows, whose results are unspecified.
        positions: [R] int32, position in its sequence of the token to sample.
        columns: [slots, len(Column)] int64.
        lists: [n] int32. Written: whether each banned token is banned in this step.
        counts: [count rows, V] int32: twice the number of times that a token was generated, plus one if the token is in
            the prompt.
        masks: [M, ceil(V / 32)] int32 or None: bit i % 32 of word i // 32 is set if token i is allowed.
        mask_rows: [R] int32, row of `masks` for each row, or -1; None if and only if `masks` is.

    Returns:
        What `sample_tokens` needs of R rows over V tokens, in C chunks.

        - scores [R, V] float32, of changed rows only: those of the others are their logits, and are not written;
        - is_changed [R] int32, whether a row has a bias, penalties, bans or a grammar mask;
        - chunk_max [R, C] float32, largest score of a chunk;
        - chunk_sum [R, C] float64, sum of exp((score - chunk_max) / temperature); 0 in greedy rows and if all scores
          are minus infinity;
        - group_max [R, C * CHUNK / GROUP] float32, largest score of a group; minus infinity beyond the vocabulary.
    """
    num_rows, vocabulary = logits.shape
    scores = logits.to(torch.float32, copy=True)
    temperatures, is_changed = torch.zeros(num_rows), torch.zeros(num_rows, dtype=torch.int32)
    used, slot_of = used_rows(slots)
    if used:
        parameters, all_lists = columns.numpy()[slot_of], lists.numpy()
        temperatures[used] = torch.from_numpy(of_column(parameters, Column.TEMPERATURE)).float()
        rows_of_masks = [-1] * len(used) if mask_rows is None else mask_rows[used].tolist()
        changes = []
        for row, position, mask_row in zip(parameters.tolist(), positions[used].tolist(), rows_of_masks, strict=True):
            mask = None if masks is None or mask_row < 0 else masks[mask_row].numpy().view(np.uint32)
            changes.append(_changes(row, all_lists, counts, position, mask))
        has_lists = (parameters[:, [Column.NUM_BIASES, Column.NUM_BANS]] > 0).any(1)
        has_lists |= (parameters[:, Column.COUNT_ROW] >= 0) | (np.array(rows_of_masks) >= 0)
        is_changed[used] = torch.from_numpy(has_lists).int()
        changed = scores[used]
        for index in change_logits(changed, parameters, changes):
            _bans(parameters[index].tolist(), all_lists)[3] = 0
        scores[used] = changed
    missing = -vocabulary % CHUNK
    chunks = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
    chunks = chunks.view(num_rows, (vocabulary + missing) // CHUNK, CHUNK)
    chunk_max = chunks.amax(-1)
    weights = ((chunks - chunk_max[..., None]) / temperatures[:, None, None]).exp()
    chunk_sum = weights.where((chunk_max > -math.inf)[..., None], 0.0).sum(-1, dtype=torch.float64)
    chunk_sum = chunk_sum.where(temperatures[:, None] > 0, 0.0)
    group_max = chunks.view(num_rows, (vocabulary + missing) // GROUP, GROUP).amax(-1)
    # Not to be used: the kernel does not write them.
    scores = scores.masked_fill(is_changed[:, None] == 0, math.nan)
    return scores, is_changed, chunk_max, chunk_sum, group_max


def _changes(
    parameters: list[Any], lists: npt.NDArray[np.int32], counts: torch.Tensor, position: int, mask: Mask | None
) -> Changes:
    """Return the changes of the slot with these `parameters`, and record in `lists` which tokens are banned."""
    first, count = parameters[Column.BIASES], parameters[Column.NUM_BIASES]
    tokens, biases = lists[first : first + 2 * count].reshape(2, count)
    seen = None
    if parameters[Column.COUNT_ROW] >= 0:
        of_row = counts[parameters[Column.COUNT_ROW]].numpy()
        ids = np.flatnonzero(of_row)
        seen = ids, (of_row[ids] >> 1).astype(np.int64)
    num_generated = position - parameters[Column.NUM_PROMPT_TOKENS]
    ring, length = parameters[Column.RING], parameters[Column.RING_LENGTH]
    last = [int(lists[ring + index % length]) for index in range(max(0, num_generated - length), num_generated)]
    bans = _bans(parameters, lists)
    for index, (size, offset) in enumerate(bans[1:3].T.tolist()):
        word = parameters[Column.BANS] + offset
        preceding = None if size < 0 else lists[word : word + size].tolist()
        bans[3, index] = is_banned(preceding, last, num_generated, parameters[Column.MIN_TOKENS])
    return Changes((tokens.astype(np.int64), biases.view(np.float32)), seen, bans[0][bans[3] != 0].tolist(), mask)


def _bans(parameters: list[Any], lists: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the four lists [4, NUM_BANS] of a slot's banned tokens, as a view."""
    first, count = parameters[Column.BANS], parameters[Column.NUM_BANS]
    return lists[first : first + 4 * count].reshape(4, count)
