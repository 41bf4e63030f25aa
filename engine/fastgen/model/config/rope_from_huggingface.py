"""RoPE configuration from config.json.

transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields
from fastgen.model.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

_GEMMA3_LOCAL_THETA = 10_000.0


def rope_configs(config: Mapping[str, Any], head_dim: int, theta: float, *, partial: bool) -> tuple[RopeConfig, ...]:
    """Return one RoPE configuration, or two for Gemma 3: of full attention, and of sliding-window attention.

    `theta` is the default of rope_theta; `partial` tells whether the family supports partial_rotary_factor.

    Raises:
        ModelError: naming the unsupported field.
    """
    fields, parameters = Fields(config), config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if config.get("model_type") != "gemma3_text":
        return (_rope(config, parameters or scaling, head_dim, fields.number("rope_theta", theta), partial),)
    full, sliding = parameters.get("full_attention") or scaling, parameters.get("sliding_attention") or {}
    return (
        _rope(config, full, head_dim, fields.number("rope_theta", theta), partial),
        _rope(config, sliding, head_dim, fields.number("rope_local_base_freq", _GEMMA3_LOCAL_THETA), partial),
    )


def _rope(
    config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int, theta: float, partial: bool
) -> RopeConfig:
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1 and not partial:
        raise ModelError("partial_rotary_factor is not 1: partial rotary positions are not served")
    dimensions = int(head_dim * share)
    base = Fields(parameters).number("rope_theta", theta)
    return RopeConfig(base, dimensions, _scaling(config, parameters, dimensions))


def _scaling(config: Mapping[str, Any], parameters: Mapping[str, Any], dimensions: int) -> Scaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if config.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # named so in Phi-3's first configurations
    fields = Fields(parameters)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields.number("factor"))
    if kind == "dynamic":
        return DynamicScaling()
    if kind == "llama3":
        return Llama3Scaling(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=_original_length(config, fields),
        )
    if kind == "yarn":
        return _yarn(config, parameters)
    if kind == "longrope":
        return _long(config, parameters, dimensions)
    raise ModelError(
        f"rope_type is {kind!r}: only default, linear, dynamic, llama3, yarn and longrope rope scaling are served"
    )


def _original_length(config: Mapping[str, Any], fields: Fields) -> int:
    """Return the length before scaling. A top-level field precedes the parameters, as in transformers."""
    beside = Fields(config).optional_integer("original_max_position_embeddings")
    if beside is not None:
        return beside
    return fields.integer("original_max_position_embeddings", config.get("max_position_embeddings"))


def _yarn(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> YarnScaling:
    fields = Fields(parameters)
    original = _original_length(config, fields)
    factor = fields.number("factor", Fields(config).integer("max_position_embeddings", 2048) / original)
    attention = fields.optional_number("attention_factor")
    if attention is None:
        part, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = _magnitude(factor, part) / _magnitude(factor, whole) if part and whole else _magnitude(factor, 1)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.get("beta_fast") or 32,
        beta_slow=parameters.get("beta_slow") or 1,
        rounded=fields.flag("truncate", True),
    )


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _long(config: Mapping[str, Any], parameters: Mapping[str, Any], dimensions: int) -> LongScaling:
    fields = Fields(parameters)
    original = _original_length(config, fields)
    factor = fields.number("factor", Fields(config).integer("max_position_embeddings") / original)
    attention = fields.optional_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        short_factors=fields.numbers("short_factor", dimensions // 2),
        long_factors=fields.numbers("long_factor", dimensions // 2),
        original_max_position_embeddings=original,
        attention_factor=attention,
    )
