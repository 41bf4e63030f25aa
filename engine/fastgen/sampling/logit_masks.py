"""Masks of logits: end tokens before min_tokens, bad words, tokens outside a grammar."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.request import SamplingParams


def banned_ends(sampling: SamplingParams, num_generated: int, end_tokens: Iterable[int]) -> set[int]:
    """Return the tokens that would end a generation shorter than `min_tokens`."""
    if num_generated >= sampling.min_tokens:
        return set()
    banned = set(sampling.stop_token_ids)
    return banned if sampling.ignore_eos else banned.union(end_tokens)


def banned_words(bad_words: abc.Sequence[abc.Sequence[int]], generated: abc.Sequence[int]) -> set[int]:
    """Return the tokens that would complete one of `bad_words` at the end of `generated`.

    A word that begins in the prompt is not banned: it is not generated as a whole.
    """
    banned = set()
    for word in bad_words:
        before = len(word) - 1
        if before <= len(generated) and list(generated[len(generated) - before :]) == list(word[:-1]):
            banned.add(word[-1])
    return banned


def ban(logits: torch.Tensor, banned: abc.Sequence[set[int]]) -> None:
    """Set each row's `banned` tokens to minus infinity in `logits` [R, vocabulary], in place."""
    rows = [row for row, tokens in enumerate(banned) for _ in tokens]
    if rows:
        tokens = [token for of_row in banned for token in of_row]
        logits[torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)] = -torch.inf


def constrain(logits: torch.Tensor, masks: abc.Sequence[npt.NDArray[np.uint32] | None]) -> None:
    """Set tokens that a row's grammar forbids to minus infinity in `logits` [R, vocabulary], in place.

    Args:
        logits: any floating type.
        masks: for each row, [ceil(vocabulary / 32)] as `Constraint.fill_mask` writes it, or None.
    """
    found = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not found:
        return
    words = np.stack([mask for _, mask in found]).astype("<u4", copy=False)
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    rows = torch.tensor([row for row, _ in found], device=logits.device)
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
