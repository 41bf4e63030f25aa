"""RoPE configuration from a GGUF file's `rope.*` keys.

Llama 3's scaling is not a key but the tensor rope_freqs.weight, which is read with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.rope import LinearScaling, LongScaling, NoRotation, RopeConfig, Scaling, YarnScaling

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_GEMMA3_LOCAL_THETA = 10_000.0


class Contents(Protocol):
    """The contents of a GGUF file, such as a `GGUFFile`."""

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
        ModelError: naming the key or tensor that is missing, invalid or not supported.
    """
    kind = file.metadata["general.architecture"]
    dimensions = fields.integer("rope.dimension_count", head_dim)
    if dimensions > head_dim or (dimensions != head_dim and kind != "phi3"):
        raise ModelError(f"{kind}.rope.dimension_count is {dimensions}, not the head size {head_dim}: not supported")
    if fields.integer("rope.dimension_count_swa", dimensions) != dimensions:
        raise ModelError(f"{kind}.rope.dimension_count_swa is not {dimensions}, that of other layers: not supported")
    default = 1_000_000.0 if kind == "gemma3" else 10_000.0
    everywhere = RopeConfig(_base(fields, "rope.freq_base", default), dimensions, _scaling(file, fields, dimensions))
    if ROPE_FACTORS in file.tensor_names():
        _check_factors(file, ROPE_FACTORS, dimensions)
        if not isinstance(everywhere.scaling, LinearScaling | None) or kind != "llama":
            raise ModelError(f"tensor {ROPE_FACTORS} with other rope scaling, or not of a llama model: not supported")
    if kind in ("granite", "granitemoe") and not fields.flag("rope.scaling.finetuned", True):
        return (replace(everywhere, scaling=NoRotation()),)  # llama.cpp's switch for Granite's positions
    if kind != "gemma3":
        return (everywhere,)
    return everywhere, RopeConfig(_base(fields, "rope.freq_base_swa", _GEMMA3_LOCAL_THETA), dimensions)


def _base(fields: Fields, name: str, default: float) -> float:
    base = fields.number(name, default)
    if base <= 1:
        raise ModelError(f"{fields.name_of(name)} is {base}: expected a number above 1")
    return base


def _factor(fields: Fields) -> float:
    """Return the scaling factor, from its current key or else the old one; 0 means 1, as in llama.cpp."""
    names = [name for name in ("rope.scaling.factor", "rope.scale_linear") if fields.value(name) is not None]
    return fields.number(names[0]) if names and fields.value(names[0]) != 0 else 1.0


def _scaling(file: Contents, fields: Fields, dimensions: int) -> Scaling | None:
    """Return the scaling. A file with a factor and no type has linear scaling, as in llama.cpp."""
    kind, factor = fields.text("rope.scaling.type", "linear"), _factor(fields)
    if {LONG_FACTORS, SHORT_FACTORS} & {*file.tensor_names()} or kind == "longrope":
        if factor != 1:
            raise ModelError(f"{fields.name_of('rope.scaling.factor')} is {factor} beside LongRoPE: not supported")
        # LongRoPE without factors has no effect
        return _long(file, fields, dimensions) if LONG_FACTORS in file.tensor_names() else None
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(factor) if factor != 1 else None
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            ),
            # ggml multiplies the two (ggml_rope_yarn).
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor)),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            rounded=True,
        )
    name = fields.name_of("rope.scaling.type")
    raise ModelError(f"{name} is {shown(kind)}: only none, linear, yarn and longrope are supported")


def _long(file: Contents, fields: Fields, dimensions: int) -> LongScaling:
    long, short = (_check_factors(file, name, dimensions) for name in (LONG_FACTORS, SHORT_FACTORS))
    return LongScaling(
        short_factors=short,
        long_factors=long,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def _check_factors(file: Contents, name: str, dimensions: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies in a tensor: positive, one for each pair of rotated dimensions."""
    if name not in file.tensor_names():
        raise ModelError(f"tensor {name} is missing: the checkpoint is incomplete")
    factors = file.tensor(name)
    if factors.shape != (dimensions // 2,):
        raise ModelError(f"tensor {name} has shape {factors.shape}: expected ({dimensions // 2},)")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"tensor {name} has a factor that is not a positive number")
    return tuple(factors.tolist())
