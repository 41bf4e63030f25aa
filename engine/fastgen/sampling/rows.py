"""The state that sampling keeps for each row between steps, and subsets of the rows of a batch of logits."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.request import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.sampling.penalties import Bias, TokenHistory, is_penalised

# Below this temperature sampling is greedy, as in vLLM: the division would overflow or leave one token anyway.
_GREEDY_BELOW = 1e-5

Mask = npt.NDArray[np.uint32]


class Draw(NamedTuple):
    """The inputs for sampling one row.

    Attributes:
        sampling: the request's parameters.
        seed: seed of the random number.
        tokens: the sequence so far, prompt first; its length is the position of the token to sample.
        num_prompt_tokens: length of the prompt in `tokens`.
        end_tokens: the model's end-of-sequence tokens.
        mask: [ceil(vocabulary / 32)], the tokens that the grammar allows, or None; see `Constraint.fill_mask`.
        history: counts of `tokens`, if a penalty needs them.
        bias: `sampling.logit_bias` as arrays.
    """

    sampling: SamplingParams
    seed: int
    tokens: abc.Sequence[int] = ()
    num_prompt_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    mask: Mask | None = None
    history: TokenHistory | None = None
    bias: Bias | None = None

    @property
    def position(self) -> int:
        """Position of the token to sample in its sequence."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether to take the token with the largest logit."""
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """Whether bias, penalties or masks apply to this row."""
        sampling = self.sampling
        return (
            self.history is not None
            or self.mask is not None
            or self.bias is not None
            or bool(sampling.bad_words)
            or self.num_generated_tokens < sampling.min_tokens
        )


class SamplingRows:
    """The draws of all rows. A row is replaced when a sequence gets it."""

    def __init__(self, end_tokens: frozenset[int]) -> None:
        self._end_tokens = end_tokens
        self._rows: dict[int, Draw] = {}

    def admit(self, parameters: RowParameters) -> None:
        """Give a row to a sequence."""
        sampling = parameters.sampling
        history = TokenHistory(sampling, parameters.num_prompt_tokens) if is_penalised(sampling) else None
        self._rows[parameters.row] = Draw(
            sampling,
            parameters.seed,
            list(parameters.tokens),
            parameters.num_prompt_tokens,
            self._end_tokens,
            history=history,
            bias=Bias.of(sampling),
        )

    def draws(self, rows: abc.Iterable[int], masks: abc.Mapping[int, Mask]) -> list[Draw]:
        """Return the draw of each of `rows`; `masks` by index in `rows`."""
        draws = [self._rows[row] for row in rows]
        for index, mask in masks.items():
            draws[index] = draws[index]._replace(mask=mask)
        for draw in draws:
            if draw.history is not None:
                draw.history.update(draw.tokens)
        return draws

    def append(self, rows: abc.Iterable[int], tokens: abc.Iterable[int]) -> None:
        """Record the token that was sampled for each of `rows`."""
        for row, token in zip(rows, tokens, strict=True):
            sequence = self._rows[row].tokens
            assert isinstance(sequence, list)
            sequence.append(token)


def row_slices(rows: list[int], size: int) -> Iterator[list[int]]:
    """Yield `rows` in lists of at most `size`."""
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def take_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return ascending, non-empty `rows` of `logits`, as a view if they are contiguous."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]
