"""Converts a request's sampling parameters to what samplers keep of a row: columns, biases and bans."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
import numpy.typing as npt

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.kernels.gpu.sampling.columns import FLOAT_COLUMNS, PROBABILITY_COLUMNS, Column, IntArray

# Below this temperature sampling is greedy, as in vLLM: the division would overflow or leave one token anyway.
_GREEDY_BELOW = 1e-5
# Any smaller share of the probability keeps as many tokens: the likeliest and its equals. A share that is 0 as float32
# would keep none.
_LEAST_SHARE = 1e-30


def columns_of(new: RowParameters, vocab_size: int) -> IntArray:
    """Return the columns [len(Column)] of a sequence; those about its lists and counts are 0."""
    sampling = new.sampling
    columns = np.zeros(len(Column), np.int64)
    numbers = columns[:FLOAT_COLUMNS].view(np.float64)
    numbers[:] = [getattr(sampling, column.name.lower()) for column in Column if column < FLOAT_COLUMNS]
    if sampling.temperature < _GREEDY_BELOW:
        numbers[Column.TEMPERATURE] = 0.0
    for share in PROBABILITY_COLUMNS:
        numbers[share] = max(numbers[share], _LEAST_SHARE)
    columns[Column.SEED] = new.seed
    columns[Column.TOP_K] = min(sampling.top_k, vocab_size)
    columns[Column.NUM_PROMPT_TOKENS] = new.num_prompt_tokens
    columns[Column.MIN_TOKENS] = sampling.min_tokens
    return columns


def bias_of(sampling: SamplingParams) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return the tokens [n] of a request's bias, and the values to add to their logits [n]."""
    tokens = np.array([token for token, _ in sampling.logit_bias], np.int64)
    return tokens, np.array([value for _, value in sampling.logit_bias], np.float32)


def bans_of(new: RowParameters, end_tokens: frozenset[int]) -> list[tuple[int, list[int] | None]]:
    """Return the tokens that may be banned: end and stop tokens, and the last tokens of bad words.

    End and stop tokens are banned until there are `min_tokens`.

    Returns:
        Tokens in ascending order, each with the tokens that precede it in the bad word, or None for an end-of-sequence
        or stop token.
    """
    sampling, num_generated = new.sampling, len(new.tokens) - new.num_prompt_tokens
    ends: set[int] = set()
    if num_generated < sampling.min_tokens:
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_tokens)}
    words = [(word[-1], list(word[:-1])) for word in sampling.bad_words]
    return sorted([*((end, None) for end in ends), *words], key=itemgetter(0))


def is_penalised(sampling: SamplingParams) -> bool:
    """Return whether any of the three penalties is set."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
