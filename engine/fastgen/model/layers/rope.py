"""Rotary angles, computed as transformers does: in float32, step by step, so that results agree to the last bits."""

from __future__ import annotations

import math

import torch

from fastgen.model.config.rope import LinearScaling, Llama3Scaling, LongScaling, Rotary, YarnScaling


class Rope:
    """Cosines and sines of the rotary angles for any positions."""

    def __init__(self, rotary: Rotary, *, longest: int, factors: torch.Tensor | None = None) -> None:
        """Computes the frequencies.

        Args:
            rotary: what to compute.
            longest: the longest sequence that will be served: it decides between LongRoPE's two sets.
            factors: [dimensions / 2] what the frequencies are divided by (GGUF's rope_freqs.weight), or None.
        """
        self._magnitude = 1.0
        exponents = torch.arange(0, rotary.dimensions, 2, dtype=torch.int64).float() / rotary.dimensions
        frequencies = 1.0 / (rotary.theta**exponents)
        if factors is not None:
            frequencies = frequencies / factors
        match rotary.scaling:
            case LinearScaling(factor):
                frequencies = frequencies / factor
            case Llama3Scaling() as scaling:
                frequencies = stretch(frequencies, scaling)
            case YarnScaling() as scaling:
                frequencies = blend_by_rotations(rotary, scaling)
                self._magnitude = scaling.attention_factor
            case LongScaling() as scaling:
                is_long = longest > scaling.original_max_position_embeddings
                divisors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
                frequencies = 1.0 / (divisors * rotary.theta**exponents)
                self._magnitude = scaling.attention_factor
        self._frequencies = frequencies

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cosines and sines, [T, dimensions / 2] float32."""
        angles = positions[:, None].float() * self._frequencies.to(positions.device)
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude


def stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    divided = frequencies / scaling.factor
    blended = (1 - blend) * divided + blend * frequencies
    return torch.where(long, divided, torch.where(short, frequencies, blended))


def blend_by_rotations(rotary: Rotary, scaling: YarnScaling) -> torch.Tensor:
    """YaRN's frequencies (Peng et al., 2023, section 3.2).

    Dimensions that turn more than `beta_fast` times within the original length keep their frequency, those that turn
    less than `beta_slow` times are divided by the factor, those between are blended along a ramp.
    """
    d = rotary.dimensions

    def dimension_of(rotations: float) -> float:
        turned = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (d * math.log(turned)) / (2 * math.log(rotary.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low if high != low else 0.001  # a ramp needs a width
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = rotary.theta ** (torch.arange(0, d, 2).float() / d)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
