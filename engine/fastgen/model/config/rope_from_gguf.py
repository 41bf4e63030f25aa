"""RoPE configuration from a GGUF file's `rope.*` keys.

Llama 3's scaling is not a key but the tensor rope_freqs.weight, which is read with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields
from fastgen.model.config.rope import LinearScaling, LongScaling, RopeConfig, Scaling, YarnScaling

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_GEMMA3_LOCAL_THETA = 10_000.0


class Contents(Protocol):
    """The contents of a GGUF file; `GGUFFile`, or a dictionary in tests."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-value pairs."""

    def tensor_names(self) -> Sequence[str]:
        """Return the names of all tensors."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor's values."""


def rope_configs(file: Contents, fields: Fields, head_dim: int) -> tuple[RopeConfig, ...]:
    """Return one RoPE configuration, or two for Gemma 3: of full attention, and of sliding-window attention.

    Raises:
        ModelError: naming the unsupported key.
    """
    kind = file.metadata["general.architecture"]
    dimensions = fields.integer("rope.dimension_count", head_dim)
    if dimensions != head_dim and kind != "phi3":
        raise ModelError(f"{kind}.rope.dimension_count is {dimensions}, not the head size {head_dim}: not served")
    default = 1_000_000.0 if kind == "gemma3" else 10_000.0
    everywhere = RopeConfig(fields.number("rope.freq_base", default), dimensions, _scaling(file, fields, dimensions))
    if kind != "gemma3":
        return (everywhere,)
    return everywhere, RopeConfig(fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA), dimensions)


def _scaling(file: Contents, fields: Fields, dimensions: int) -> Scaling | None:
    if LONG_FACTORS in file.tensor_names():
        return _long(file, fields, dimensions)
    kind = fields.text("rope.scaling.type", "none")
    if kind in ("none", "longrope"):  # LongRoPE without factors has no effect
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
        raise ModelError(f"{LONG_FACTORS} has {len(long)} factors: expected {dimensions // 2}")
    return LongScaling(
        short_factors=short,
        long_factors=long,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )
