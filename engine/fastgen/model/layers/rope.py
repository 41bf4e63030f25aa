"""Rotary angles in float32.

The order of operations is that of transformers, so that results agree to the last bit.
"""

from __future__ import annotations

import math

import torch

from fastgen.model.config.rope import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoRotation,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)


class Rope:
    """Cosines and sines of rotary angles.

    Args:
        longest: the longest sequence to serve, which selects LongRoPE's short or long factors.
        factors: [dimensions / 2] divisors of the frequencies (GGUF's rope_freqs.weight), or None.
    """

    def __init__(self, rope: RopeConfig, *, longest: int, factors: torch.Tensor | None = None) -> None:
        self._magnitude = 1.0
        exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.int64).float() / rope.dimensions
        frequencies = 1.0 / (rope.theta**exponents)
        if factors is not None:
            frequencies = frequencies / factors
        match rope.scaling:
            case NoRotation():
                frequencies = torch.zeros_like(frequencies)
            case LinearScaling(factor):
                frequencies = frequencies / factor
            case Llama3Scaling() as scaling:
                frequencies = stretch(frequencies, scaling)
            case YarnScaling() as scaling:
                frequencies = blend_by_rotations(rope, scaling)
                self._magnitude = scaling.attention_factor
            case ProportionalScaling(share, factor):
                frequencies = frequencies / factor
                frequencies[int(share * rope.dimensions // 2) :] = 0
            case LongScaling() as scaling:
                is_long = longest > scaling.original_max_position_embeddings
                divisors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
                frequencies = 1.0 / (divisors * rope.theta**exponents)
                self._magnitude = scaling.attention_factor
        self._frequencies = frequencies

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [T, dimensions / 2] in float32 for positions [T]."""
        angles = positions[:, None].float() * self._frequencies.to(positions.device)
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude


def query_scales(scaling: QueryScaling, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors [T, 1] float32 of queries at positions [T]."""
    periods = torch.floor((positions + scaling.offset).float() / scaling.original_max_position_embeddings)
    return (1 + scaling.beta * torch.log(1 + periods))[:, None]


def stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Apply Llama 3.1's scaling to frequencies.

    Low ones are divided by the factor, high ones are kept, and those between are blended. If the bounds are equal, the
    blend divides by 0, and no frequency takes it.
    """
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    long = wavelengths >= original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    divided = frequencies / scaling.factor
    blended = (1 - blend) * divided + blend * frequencies
    return torch.where(long, divided, torch.where(short, frequencies, blended))


def blend_by_rotations(rope: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    """Return YaRN's frequencies (Peng et al., 2023, section 3.2).

    Dimensions that rotate more than `beta_fast` times within the original length keep their frequency, those that
    rotate less than `beta_slow` times are divided by the factor, and those between are blended along a ramp.
    """
    d = rope.dimensions

    def dimension_of(rotations: float) -> float:
        turned = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (d * math.log(turned)) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low if high != low else 0.001  # avoid division by zero
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = rope.theta ** (torch.arange(0, d, 2).float() / d)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
