"""Applies biases, penalties, grammar masks and bans to logits, on any device.

Work is proportional to the tokens that a bias, penalties and bans concern, except for masks.
"""

from __future__ import annotations

import math
from collections import abc
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels.gpu.sampling.columns import Column, IntArray, of_column, take_rows

Mask = npt.NDArray[np.uint32]


class Changes(NamedTuple):
    """Bias, penalties, bans and grammar mask of one row in one step. `parameters` has the strengths of the penalties.

    Attributes:
        bias: tokens [n], and float32 values [n] to add to their logits.
        seen: the distinct tokens [n] that penalties concern, and how often each was generated [n]; 0 for tokens that
            only the prompt contains.
        banned: tokens that cannot be sampled, unless the mask allows no other.
        mask: [ceil(V / 32)] for a vocabulary of V: bit i % 32 of word i // 32 is set if the grammar allows token i.
    """

    bias: tuple[IntArray, npt.NDArray[np.float32]] | None = None
    seen: tuple[IntArray, IntArray] | None = None
    banned: list[int] | None = None
    mask: Mask | None = None


def change_logits(logits: torch.Tensor, parameters: IntArray, changes: abc.Sequence[Changes]) -> list[int]:
    """Apply the `changes` of each row to float32 `logits` [R, V], in place, on any device.

    Args:
        parameters: [R, len(Column)].

    Returns:
        Rows whose bans are ignored, because mask and bans would leave no token.
    """
    _add_biases(logits, [change.bias for change in changes])
    _penalise(logits, parameters, [change.seen for change in changes])
    _constrain(logits, [change.mask for change in changes])
    return _ban(logits, [change.banned for change in changes])


def is_banned(preceding: list[int] | None, generated: list[int], num_generated: int, min_tokens: int) -> bool:
    """Return whether an end or stop token, or the last token of a bad word, is banned.

    A word that begins in the prompt is not banned: it is not generated as a whole.

    Args:
        preceding: the tokens of the bad word before its last one; None for an end or stop token.
        generated: the generated tokens, or as many of the last ones as the longest bad word needs.
        num_generated: number of generated tokens.
        min_tokens: tokens to generate before one may end the generation.
    """
    if preceding is None:
        return num_generated < min_tokens
    return len(preceding) <= len(generated) and generated[len(generated) - len(preceding) :] == preceding


def _add_biases(logits: torch.Tensor, biases: abc.Sequence[tuple[IntArray, npt.NDArray[np.float32]] | None]) -> None:
    """Add each row's bias. Several for one token accumulate."""
    found = [(row, *bias) for row, bias in enumerate(biases) if bias is not None and len(bias[0])]
    if not found:
        return
    places = _places(logits, [(row, tokens) for row, tokens, _ in found])
    values = torch.from_numpy(np.concatenate([values for *_, values in found])).to(logits.device)
    logits.index_put_(places, values, accumulate=True)


def _penalise(logits: torch.Tensor, parameters: IntArray, seen: abc.Sequence[tuple[IntArray, IntArray] | None]) -> None:
    """Apply the three penalties.

    The repetition penalty (Keskar et al., 2019, as in transformers and vLLM) divides positive logits and multiplies
    negative ones, for every token of prompt and generation. Then the presence penalty is subtracted once from each
    generated token, and the frequency penalty once per occurrence.
    """
    found = [(row, *pair) for row, pair in enumerate(seen) if pair is not None and len(pair[0])]
    if not found:
        return
    own = parameters[[row for row, *_ in found]]
    sizes = [len(tokens) for _, tokens, _ in found]

    def for_each(column: Column) -> torch.Tensor:
        values = of_column(own, column).astype(np.float32)
        return torch.from_numpy(np.repeat(values, sizes)).to(logits.device)

    places = _places(logits, [(row, tokens) for row, tokens, _ in found])
    counts = torch.from_numpy(np.concatenate([counts for *_, counts in found])).to(logits.device, logits.dtype)
    repetition = for_each(Column.REPETITION_PENALTY)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= for_each(Column.FREQUENCY_PENALTY) * counts
    values -= for_each(Column.PRESENCE_PENALTY) * (counts > 0)
    logits[places] = values


def _constrain(logits: torch.Tensor, masks: abc.Sequence[Mask | None]) -> None:
    """Set tokens that a row's grammar forbids to minus infinity."""
    found = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not found:
        return
    words = np.stack([mask for _, mask in found]).astype("<u4", copy=False)
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    rows = torch.tensor([row for row, _ in found], device=logits.device)
    logits[rows] = logits[rows].masked_fill(forbidden, -math.inf)


def _ban(logits: torch.Tensor, banned: abc.Sequence[list[int] | None]) -> list[int]:
    """Set each row's banned tokens to minus infinity, except in the rows without other tokens, which are returned."""
    rows = [row for row, tokens in enumerate(banned) if tokens]
    if not rows:
        return []
    # Not from a list of pairs: a request may ban thousands of tokens in each of its generations.
    places = _places(logits, [(row, np.array(banned[row], np.int64)) for row in rows])
    before = logits[places]
    logits[places] = -math.inf
    largest = take_rows(logits, rows).amax(-1).tolist()
    ignored = [row for row, value in zip(rows, largest, strict=True) if value == -math.inf]
    if ignored:
        is_freed = torch.isin(places[0], torch.tensor(ignored, device=logits.device))
        logits[tuple(index[is_freed] for index in places)] = before[is_freed]
    return ignored


def _places(logits: torch.Tensor, tokens: list[tuple[int, IntArray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of (row, tokens of this row) in `logits`: rows [n] and tokens [n]."""
    rows = np.repeat([row for row, _ in tokens], [len(of_row) for _, of_row in tokens])
    columns = np.concatenate([of_row for _, of_row in tokens])
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
