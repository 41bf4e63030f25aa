"""Logits shifted by what a request prefers and by what it has said already.

Everything here works on (row, token) pairs in flat arrays: one gather and one scatter for a whole batch.
"""

from __future__ import annotations

from collections import abc

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.request import SamplingParams

IntArray = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class TokenHistory:
    """The distinct tokens of one sequence and how often each was generated, kept up token by token.

    Counting a sequence anew in each pass would cost its length; this costs its new tokens.
    """

    __slots__ = ("_counts", "_ids", "_num_prompt_tokens", "_place", "_seen")

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        # Only a repetition penalty looks at the prompt.
        self._seen = 0 if sampling.repetition_penalty != 1 else num_prompt_tokens
        self._place: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, np.int64)

    @property
    def ids(self) -> IntArray:
        """[n] distinct tokens, in order of their first appearance."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> IntArray:
        """[n] how often each of `ids` was generated; 0 for one that only the prompt has."""
        return self._counts[: len(self._place)]

    def update(self, tokens: abc.Sequence[int]) -> None:
        """Takes in what came to `tokens` (the prompt, then what was generated) since the last time."""
        for index in range(self._seen, len(tokens)):
            place = self._place_of(tokens[index])
            self._counts[place] += index >= self._num_prompt_tokens
        self._seen = max(self._seen, len(tokens))

    def _place_of(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
        return place


def is_penalised(sampling: SamplingParams) -> bool:
    """Does what was said before weigh on what comes next?"""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def add_bias(logits: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> None:
    """Adds each row's logit_bias to `logits` [R, vocabulary], in place."""
    rows = [row for row, sampling in enumerate(settings) for _ in sampling.logit_bias]
    if not rows:
        return
    tokens = [token for sampling in settings for token, _ in sampling.logit_bias]
    biases = [bias for sampling in settings for _, bias in sampling.logit_bias]
    device = logits.device
    places = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
    logits.index_put_(places, torch.tensor(biases, dtype=logits.dtype, device=device), accumulate=True)


def penalise(
    logits: torch.Tensor, settings: abc.Sequence[SamplingParams], histories: abc.Sequence[TokenHistory | None]
) -> None:
    """Applies the three penalties to `logits` [R, vocabulary], in place.

    Repetition (Keskar et al., 2019, as transformers and vLLM have it) divides a positive logit and multiplies a
    negative one, of every token of prompt and generation. Then the presence penalty is taken once from each token that
    was generated, the frequency penalty once for each time.
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
