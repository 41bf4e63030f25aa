"""Rotary positions from a GGUF file's `rope.*` keys.

Llama 3's stretched frequencies are no key but a tensor, rope_freqs.weight, which goes with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields
from fastgen.model.config.rope import LinearScaling, LongScaling, Rotary, Scaling, YarnScaling

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_GEMMA3_LOCAL_THETA = 10_000.0


class Contents(Protocol):
    """What a GGUF file holds, as `GGUFFile` gives it."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The key-value pairs."""

    def tensor_names(self) -> Sequence[str]:
        """All tensors."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor's values."""


def rotaries(file: Contents, fields: Fields, head_dim: int) -> tuple[Rotary, ...]:
    """One set of rotary positions, or Gemma 3's two: those of layers that see all, then those of layers with a window.

    Args:
        file: with the factors of LongRoPE as tensors.
        fields: the architecture's own keys.
        head_dim: size of a head.

    Raises:
        ModelError: naming the key at fault.
    """
    kind = file.metadata["general.architecture"]
    dimensions = fields.integer("rope.dimension_count", head_dim)
    if dimensions != head_dim and kind != "phi3":
        raise ModelError(f"{kind}.rope.dimension_count is {dimensions}, not the head size {head_dim}: not served")
    default = 1_000_000.0 if kind == "gemma3" else 10_000.0
    everywhere = Rotary(fields.number("rope.freq_base", default), dimensions, _scaling(file, fields, dimensions))
    if kind != "gemma3":
        return (everywhere,)
    return everywhere, Rotary(fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA), dimensions)


def _scaling(file: Contents, fields: Fields, dimensions: int) -> Scaling | None:
    if LONG_FACTORS in file.tensor_names():
        return _long(file, fields, dimensions)
    kind = fields.text("rope.scaling.type", "none")
    if kind in ("none", "longrope"):  # LongRoPE without factors changes nothing
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
            # ggml multiplies the two (ggml_rope_yarn).
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor)),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            rounded=True,
        )
    raise ModelError(f"{fields.name_of('rope.scaling.type')} is {kind!r}: only linear, yarn and longrope are served")


def _long(file: Contents, fields: Fields, dimensions: int) -> LongScaling:
    long, short = (tuple(file.tensor(name).tolist()) for name in (LONG_FACTORS, SHORT_FACTORS))
    if not len(long) == len(short) == dimensions // 2:
        raise ModelError(f"{LONG_FACTORS} has {len(long)} factors: {dimensions // 2} were expected")
    return LongScaling(
        short_factors=short,
        long_factors=long,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )
