"""Rotary positions as a model's configuration describes them; `rope` computes them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions squeezed: frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling by the length of the sequence, which has no effect up to the model's own length.

    Beyond it every new token would change the frequencies of all keys before it, which a cache of rotated keys cannot
    follow: the model is served up to its own length, where nothing is scaled.
    """


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretched frequencies; names as in Hugging Face's `rope_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023); names as in Hugging Face's `rope_parameters`.

    `attention_factor` is on cosines and sines; `rounded` is their `truncate`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    rounded: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (Ding et al., 2024): frequencies divided one by one, by other numbers for long sequences.

    transformers changes from the short numbers to the long ones when a sequence outgrows the original length, and then
    computes all its keys again. Here one set serves all sequences: the short one, exact up to the original length, or,
    where the engine is told to serve more, the long one, exact beyond it.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of some layers (Su et al., 2021).

    Attributes:
        theta: base of the wavelengths.
        dimensions: the first ones of a head that turn; the rest stay as they are.
        scaling: how frequencies are stretched beyond the length the model was first trained with.
    """

    theta: float
    dimensions: int
    scaling: Scaling | None = None
