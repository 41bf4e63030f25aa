"""Logit bias, and repetition, presence and frequency penalties.

They work on flat arrays of (row, token) pairs: one gather and one scatter for a whole batch.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.request import SamplingParams

IntArray = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class TokenHistory:
    """The distinct tokens of one sequence and how often each was generated, updated incrementally.

    An update costs the new tokens; recounting in each step would cost the length of the sequence.
    """

    __slots__ = ("_ids_and_counts", "_index", "_num_prompt_tokens", "_seen")

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        # Only the repetition penalty includes the prompt.
        self._seen = 0 if sampling.repetition_penalty != 1 else num_prompt_tokens
        self._index: dict[int, int] = {}  # of a token in `ids`
        self._ids_and_counts = np.zeros((2, _FIRST_CAPACITY), np.int64)

    @property
    def ids(self) -> IntArray:
        """Distinct tokens [n] in order of first occurrence."""
        return self._ids_and_counts[0, : len(self._index)]

    @property
    def counts(self) -> IntArray:
        """How often each of `ids` was generated [n]; 0 for tokens that only the prompt contains."""
        return self._ids_and_counts[1, : len(self._index)]

    def update(self, tokens: abc.Sequence[int]) -> None:
        """Count the tokens added to `tokens`, prompt first, since the last update."""
        for position in range(self._seen, len(tokens)):
            index = self._index.setdefault(tokens[position], len(self._index))
            if index == self._ids_and_counts.shape[1]:
                self._ids_and_counts = np.pad(self._ids_and_counts, ((0, 0), (0, index)))
            self._ids_and_counts[0, index] = tokens[position]
            self._ids_and_counts[1, index] += position >= self._num_prompt_tokens
        self._seen = max(self._seen, len(tokens))


def is_penalised(sampling: SamplingParams) -> bool:
    """Return whether any of the three penalties is set."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Bias:
    """The logit bias of one sequence, as arrays: made once, not in each step.

    Attributes:
        tokens: [n].
        values: [n], to be added to the logits of the tokens.
    """

    tokens: IntArray
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, sampling: SamplingParams) -> Bias | None:
        """Return the bias of a request, or None if it has none."""
        if not sampling.logit_bias:
            return None
        tokens, values = zip(*sampling.logit_bias, strict=True)
        return cls(np.array(tokens, np.int64), np.array(values, np.float32))


def add_bias(logits: torch.Tensor, biases: abc.Sequence[Bias | None]) -> None:
    """Add each row's logit bias to `logits` [R, vocabulary], in place."""
    found = [(row, bias) for row, bias in enumerate(biases) if bias is not None]
    if not found:
        return
    sizes = [len(bias.tokens) for _, bias in found]
    rows = torch.from_numpy(np.repeat([row for row, _ in found], sizes)).to(logits.device)
    tokens = torch.from_numpy(np.concatenate([bias.tokens for _, bias in found])).to(logits.device)
    values = torch.from_numpy(np.concatenate([bias.values for _, bias in found])).to(logits.device, logits.dtype)
    logits.index_put_((rows, tokens), values, accumulate=True)


def penalise(
    logits: torch.Tensor, settings: abc.Sequence[SamplingParams], histories: abc.Sequence[TokenHistory | None]
) -> None:
    """Apply the three penalties to `logits` [R, vocabulary], in place.

    The repetition penalty (Keskar et al., 2019, as in transformers and vLLM) divides positive logits and multiplies
    negative ones, for every token of prompt and generation. Then the presence penalty is subtracted once from each
    generated token, and the frequency penalty once per occurrence.
    """
    found = [(row, history) for row, history in enumerate(histories) if history is not None and len(history.ids)]
    if not found:
        return
    device, dtype = logits.device, logits.dtype
    sizes = [len(history.ids) for _, history in found]
    rows = torch.from_numpy(np.repeat([row for row, _ in found], sizes)).to(device)
    tokens = torch.from_numpy(np.concatenate([history.ids for _, history in found])).to(device)
    counts = torch.from_numpy(np.concatenate([history.counts for _, history in found])).to(device, dtype)

    def for_each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[rows]

    values = logits[rows, tokens]
    repetition = for_each([sampling.repetition_penalty for sampling in settings])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= for_each([sampling.frequency_penalty for sampling in settings]) * counts
    values -= for_each([sampling.presence_penalty for sampling in settings]) * (counts > 0)
    logits[rows, tokens] = values
