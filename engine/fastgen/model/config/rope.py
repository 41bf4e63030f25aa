"""Rotary position embeddings (RoPE) as described by a model's configuration.

`layers.rope` computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK scaling, which has no effect up to the model's original length.

    Beyond it, each new token changes the frequencies of all earlier keys, but the cache holds rotated keys. So the
    model is served up to its original length only, without scaling.
    """


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling; names as in Hugging Face's `rope_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023); names as in Hugging Face's `rope_parameters`.

    `attention_factor` multiplies cosines and sines; `rounded` is Hugging Face's `truncate`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    rounded: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (Ding et al., 2024): each frequency has its own divisor.

    Long sequences have a second set of divisors. transformers switches to the long divisors, and recomputes all keys,
    when a sequence exceeds the original length. Here one set serves all sequences: the short one, exact up to the
    original length, or, if --max-model-length is beyond it, the long one, exact for longer sequences.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class NoRotation:
    """No positions: queries and keys are not rotated (NoPE, Yang et al., 2025)."""


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the share of the pairs with the shortest wavelengths is rotated; frequencies are divided by `factor`.

    Pairs are halves of the whole head apart, other than with fewer rotated dimensions (Gemma 4).
    """

    share: float
    factor: float


Scaling = NoRotation | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (Su et al., 2021) of one or more layers.

    Attributes:
        theta: base of the wavelengths.
        dimensions: number of leading head dimensions that are rotated.
        scaling: extension beyond the length of pre-training.
    """

    theta: float
    dimensions: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow with their position p: by 1 + beta * log(1 + floor((p + offset) / original length)).

    The offset is 1 in Llama 4 and 0 in Ministral 3.
    """

    beta: float
    original_max_position_embeddings: int
    offset: int = 0


def longest_sequence(max_position_embeddings: int, ropes: Sequence[RopeConfig]) -> int:
    """Return the longest sequence that can be served; some configurations state the length before scaling."""
    match ropes:
        case [RopeConfig(scaling=LinearScaling(factor))]:
            return int(max_position_embeddings * factor)
        case [RopeConfig(scaling=YarnScaling(factor=factor, original_max_position_embeddings=original))]:
            return max(max_position_embeddings, int(original * factor))
    return max_position_embeddings
