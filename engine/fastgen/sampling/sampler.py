"""Sample the next token of each row.

Sampling parameters apply in this order, which is the order of transformers and vLLM where they agree:

1. logit_bias, then repetition, frequency and presence penalties;
2. masks: end tokens before min_tokens, bad words, tokens that the grammar forbids;
3. greedy: the largest logit; otherwise temperature and filters, see `top_k_top_p`, then a random draw.

Random numbers are counter-based, keyed by (seed, position): the same seed gives the same tokens regardless of the rest
of the batch, also after a preemption. Log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable

import torch

from fastgen.core.request import SamplingParams
from fastgen.core.step_output import TokenLogprobs
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE
from fastgen.sampling import logit_masks, penalties, top_k_top_p
from fastgen.sampling.logprobs import token_logprobs
from fastgen.sampling.rng import uniforms
from fastgen.sampling.rows import Draw, row_slices, take_rows


def sample(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Sample a token for each row of `logits` [S, vocabulary], of any floating type, on any device.

    Greedy resolves ties to the smallest token id. `logits` is not modified.

    Returns:
        The tokens, and by row the log-probabilities of those that requested them.
    """
    assert len(logits) == len(draws)
    if not draws:
        return [], {}
    changed = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not changed:
        sampled = _choose(logits, draws)
    else:
        unchanged = [row for row, draw in enumerate(draws) if not draw.changes_logits]
        sampled = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if unchanged:
            sampled[unchanged] = _choose(take_rows(logits, unchanged), [draws[row] for row in unchanged])
        for rows in row_slices(changed, ROWS_SAMPLED_AT_ONCE):
            group = [draws[row] for row in rows]
            sampled[rows] = _choose(_process_logits(take_rows(logits, rows), group), group)
    tokens: list[int] = sampled.tolist()
    return tokens, _logprobs(logits, draws, tokens)


def _process_logits(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """Return a float32 copy of `logits` [R, vocabulary] with bias, penalties and masks applied.

    If the masks leave a row no token, min_tokens and bad words are dropped for it: the grammar decides.
    """
    processed = _apply_penalties(logits, draws)
    banned = [_banned(draw) for draw in draws]
    masks = [draw.mask for draw in draws]
    logit_masks.ban(processed, banned)
    logit_masks.constrain(processed, masks)
    rows = [row for row, tokens in enumerate(banned) if tokens]
    stuck = [row for row, top in zip(rows, processed[rows].amax(-1).tolist(), strict=True) if top == -math.inf]
    if stuck:
        freed = _apply_penalties(logits[stuck], [draws[row] for row in stuck])
        logit_masks.constrain(freed, [masks[row] for row in stuck])
        processed[stuck] = freed
    return processed


def _apply_penalties(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """Return a float32 copy of `logits` [R, vocabulary] with bias and penalties applied."""
    penalised = logits.to(torch.float32, copy=True)
    settings = [draw.sampling for draw in draws]
    penalties.add_bias(penalised, [draw.bias for draw in draws])
    penalties.penalise(penalised, settings, [draw.history for draw in draws])
    return penalised


def _banned(draw: Draw) -> set[int]:
    banned = logit_masks.banned_ends(draw.sampling, draw.num_generated_tokens, draw.end_tokens)
    if draw.sampling.bad_words:
        banned |= logit_masks.banned_words(draw.sampling.bad_words, draw.tokens[draw.num_prompt_tokens :])
    return banned


def _choose(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """Choose a token [R] for each row of `logits` [R, vocabulary], by temperature and filters."""
    groups: dict[_Method, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_method_of(draw), []).append(row)
    if groups.keys() == {None}:
        return logits.argmax(-1)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    for method, group in groups.items():
        for rows in row_slices(group, ROWS_SAMPLED_AT_ONCE):
            some, own = take_rows(logits, rows), [draws[row] for row in rows]
            if method is None:
                tokens[rows] = some.argmax(-1)
            else:
                numbers = uniforms([draw.seed for draw in own], [draw.position for draw in own])
                tokens[rows] = method(
                    some, [draw.sampling for draw in own], torch.from_numpy(numbers).to(logits.device)
                )
    return tokens


# Draws tokens from logits by settings and random numbers; None is greedy.
_Method = Callable[[torch.Tensor, abc.Sequence[SamplingParams], torch.Tensor], torch.Tensor] | None


def _method_of(draw: Draw) -> _Method:
    if draw.is_greedy:
        return None
    return top_k_top_p.draw_filtered if top_k_top_p.is_filtered(draw.sampling) else top_k_top_p.draw_unfiltered


def _logprobs(logits: torch.Tensor, draws: abc.Sequence[Draw], tokens: abc.Sequence[int]) -> dict[int, TokenLogprobs]:
    """Return log-probabilities by row, for the rows that requested them."""
    found: dict[int, TokenLogprobs] = {}
    for rows in row_slices(
        [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None], ROWS_SAMPLED_AT_ONCE
    ):
        most = [draws[row].sampling.logprobs or 0 for row in rows]
        found |= zip(rows, token_logprobs(take_rows(logits, rows), [tokens[row] for row in rows], most), strict=True)
    return found
