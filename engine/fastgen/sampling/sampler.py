"""Choosing each row's next token.

What a request asks for applies in this order, which is transformers' and vLLM's where these agree:

1. logit_bias is added; then repetition, frequency and presence penalties;
2. what may not come gets no chance: end tokens before min_tokens, bad words, what the grammar does not allow;
3. greedy takes the largest logit that is left; else temperature, top-k, top-p, min-p and typical-p, and a draw.

Random choices come from a counter-based generator keyed by (seed, position): the same seed gives the same tokens
whatever else is in the batch, after a preemption too. Log-probabilities are the model's own, before all of this.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fastgen.core.constraint import Constraint
from fastgen.core.request import SamplingParams
from fastgen.core.scheduler import Chunk
from fastgen.core.step_output import SampledToken, TokenLogprobs
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE
from fastgen.sampling import logit_masks, penalties, top_k_top_p
from fastgen.sampling.logprobs import token_logprobs
from fastgen.sampling.penalties import TokenHistory
from fastgen.sampling.rng import uniforms

# Below it, dividing by the temperature leaves nothing but the likeliest token, or overflows: greedy, as in vLLM.
_GREEDY_BELOW = 1e-5


class Draw(NamedTuple):
    """What one row's choice depends on.

    Attributes:
        sampling: how to choose.
        seed: of its random number.
        tokens: the sequence so far, prompt first; its length is the position of the token to choose.
        num_prompt_tokens: how many of `tokens` are the prompt's.
        end_tokens: the model's end-of-sequence tokens.
        constraint: of a request with a grammar.
        history: the counts of `tokens` where a penalty needs them.
    """

    sampling: SamplingParams
    seed: int
    tokens: abc.Sequence[int] = ()
    num_prompt_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    history: TokenHistory | None = None

    @classmethod
    def of(cls, chunk: Chunk, end_tokens: frozenset[int]) -> Draw:
        """What the token after `chunk` depends on; brings its sequence's counts up to date where they are needed."""
        sequence = chunk.sequence
        sampling, tokens, prompt = sequence.sampling, sequence.tokens, sequence.num_prompt_tokens
        history = None
        if penalties.is_penalised(sampling):
            history = sequence.history if isinstance(sequence.history, TokenHistory) else TokenHistory(sampling, prompt)
            history.update(tokens)
            sequence.history = history
        return cls(sampling, sequence.seed, tokens, prompt, end_tokens, sequence.constraint, history)

    @property
    def position(self) -> int:
        """Of the token to choose, in its sequence."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens chosen so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_greedy(self) -> bool:
        """Is the likeliest token the one to take?"""
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def is_shaped(self) -> bool:
        """Do the logits change before the choice?"""
        sampling = self.sampling
        return (
            self.history is not None
            or self.constraint is not None
            or bool(sampling.logit_bias or sampling.bad_words)
            or self.num_generated_tokens < sampling.min_tokens
        )


def sample(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> list[SampledToken]:
    """A token for each row of `logits` [S, vocabulary], of any floating type, on any device.

    Of equal logits, greedy takes the smallest token id. `logits` stay as they are.
    """
    assert len(logits) == len(draws)
    if not draws:
        return []
    shaped = [row for row, draw in enumerate(draws) if draw.is_shaped]
    if not shaped:
        chosen = _choose(logits, draws)
    else:
        as_is = [row for row, draw in enumerate(draws) if not draw.is_shaped]
        chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if as_is:
            chosen[as_is] = _choose(_take(logits, as_is), [draws[row] for row in as_is])
        for rows in _slices(shaped):
            group = [draws[row] for row in rows]
            chosen[rows] = _choose(_shape(_take(logits, rows), group), group)
    tokens: list[int] = chosen.tolist()
    logprobs = _logprobs(logits, draws, tokens)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def _shape(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """`logits` [R, vocabulary] in float32 with bias, penalties and masks applied.

    A row that would have no token left gives up min_tokens and bad words: the grammar says what can follow at all, and
    a request must go on somehow.
    """
    shaped = _prefer(logits, draws)
    banned = [_banned(draw) for draw in draws]
    constraints = [draw.constraint for draw in draws]
    logit_masks.ban(shaped, banned)
    logit_masks.constrain(shaped, constraints)
    rows = [row for row, tokens in enumerate(banned) if tokens]
    stuck = [row for row, top in zip(rows, shaped[rows].amax(-1).tolist(), strict=True) if top == -math.inf]
    if stuck:
        freed = _prefer(logits[stuck], [draws[row] for row in stuck])
        logit_masks.constrain(freed, [constraints[row] for row in stuck])
        shaped[stuck] = freed
    return shaped


def _prefer(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """A float32 copy of `logits` [R, vocabulary] with bias and penalties applied."""
    preferred = logits.to(torch.float32, copy=True)
    settings = [draw.sampling for draw in draws]
    penalties.add_bias(preferred, settings)
    penalties.penalise(preferred, settings, [draw.history for draw in draws])
    return preferred


def _banned(draw: Draw) -> set[int]:
    banned = logit_masks.banned_ends(draw.sampling, draw.num_generated_tokens, draw.end_tokens)
    if draw.sampling.bad_words:
        banned |= logit_masks.banned_words(draw.sampling.bad_words, draw.tokens[draw.num_prompt_tokens :])
    return banned


def _choose(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    """[R, vocabulary] -> [R], by the logits as they are."""
    groups: dict[_Choice, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_choice_of(draw), []).append(row)
    if groups.keys() == {_take_likeliest}:
        return logits.argmax(-1)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    for choice, group in groups.items():
        for rows in _slices(group):
            tokens[rows] = choice(_take(logits, rows), [draws[row] for row in rows])
    return tokens


_Choice = Callable[[torch.Tensor, abc.Sequence[Draw]], torch.Tensor]


def _choice_of(draw: Draw) -> _Choice:
    if draw.is_greedy:
        return _take_likeliest
    return _draw_limited if top_k_top_p.is_limited(draw.sampling) else _draw_whole


def _take_likeliest(logits: torch.Tensor, _draws: abc.Sequence[Draw]) -> torch.Tensor:
    return logits.argmax(-1)


def _draw_whole(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    return top_k_top_p.draw_whole(logits, [draw.sampling for draw in draws], _uniforms(draws, logits.device))


def _draw_limited(logits: torch.Tensor, draws: abc.Sequence[Draw]) -> torch.Tensor:
    return top_k_top_p.draw_limited(logits, [draw.sampling for draw in draws], _uniforms(draws, logits.device))


def _uniforms(draws: abc.Sequence[Draw], device: torch.device) -> torch.Tensor:
    numbers = uniforms([draw.seed for draw in draws], [draw.position for draw in draws])
    return torch.from_numpy(numbers).to(device)


def _logprobs(logits: torch.Tensor, draws: abc.Sequence[Draw], tokens: abc.Sequence[int]) -> dict[int, TokenLogprobs]:
    """By row, of the rows whose requests ask for them."""
    found: dict[int, TokenLogprobs] = {}
    for rows in _slices([row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]):
        most = [draws[row].sampling.logprobs or 0 for row in rows]
        found |= zip(rows, token_logprobs(_take(logits, rows), [tokens[row] for row in rows], most), strict=True)
    return found


def _slices(rows: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(rows), ROWS_SAMPLED_AT_ONCE):
        yield rows[first : first + ROWS_SAMPLED_AT_ONCE]


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Ascending `rows` of `logits`, uncopied where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]
