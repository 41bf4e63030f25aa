"""Rotary angles, computed as transformers does: in float32, step by step, so that results agree to the last bits."""

from __future__ import annotations

import math

import torch

from fastgen.model.architecture import Llama3RopeScaling, ModelArchitecture


class Rope:
    """Cosines and sines of the rotary angles for any positions."""

    def __init__(self, architecture: ModelArchitecture, factors: torch.Tensor | None = None) -> None:
        """`factors`: [head_dim / 2] what the frequencies are divided by (GGUF's rope_freqs.weight), or None."""
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
        frequencies = 1.0 / (architecture.rope_theta**exponents)
        if factors is not None:
            frequencies = frequencies / factors
        if architecture.rope_scaling is not None:
            frequencies = stretch(frequencies, architecture.rope_scaling)
        self._frequencies = frequencies

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cosines and sines, [T, head_dim / 2] float32."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos(), angles.sin()


def stretch(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    divided = frequencies / scaling.factor
    blended = (1 - blend) * divided + blend * frequencies
    return torch.where(long, divided, torch.where(short, frequencies, blended))
