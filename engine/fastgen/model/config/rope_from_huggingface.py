"""RoPE configuration from config.json.

transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`. If a file has both objects,
`rope_scaling` takes precedence, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"


def rope_configs(fields: Fields, head_dim: int, *, partial: bool) -> tuple[RopeConfig, ...]:
    """Return one RoPE configuration, or two for Gemma 3: of full attention, and of sliding-window attention.

    `partial` tells whether the family supports partial_rotary_factor.

    Raises:
        ModelError: naming the field that is missing, invalid or not supported.
    """
    parameters, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if fields.text("model_type") != "gemma3_text":
        for name, value in (scaling or parameters).items():
            if isinstance(value, Mapping):
                where = "rope_scaling" if scaling else "rope_parameters"
                raise ModelError(f"{where} has {shown(name)}: all layers must have the same rotary positions")
        return (_rope(fields, Fields(scaling or parameters), head_dim, fields.number("rope_theta"), partial),)
    if parameters and not parameters.keys() <= {_FULL, _SLIDING}:
        raise ModelError(f"rope_parameters is {shown(parameters)}: expected one object for {_FULL}, one for {_SLIDING}")
    by_type = Fields(parameters)
    full = {**by_type.mapping(_FULL), **scaling}
    return (
        _rope(fields, Fields(full), head_dim, fields.number("rope_theta"), partial),
        _rope(fields, Fields(by_type.mapping(_SLIDING)), head_dim, fields.number("rope_local_base_freq"), partial),
    )


def _rope(fields: Fields, parameters: Fields, head_dim: int, theta: float, partial: bool) -> RopeConfig:
    share = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1 or (share < 1 and not partial):
        expected = "at most 1" if partial else "1, as models of this type rotate whole heads"
        raise ModelError(f"partial_rotary_factor is {share}: expected {expected}")
    dimensions = int(head_dim * share)
    base = parameters.number("rope_theta", theta)
    if base <= 1:
        raise ModelError(f"rope_theta is {base}: expected a number above 1")
    return RopeConfig(base, dimensions, _scaling(fields, parameters, dimensions))


def _scaling(fields: Fields, parameters: Fields, dimensions: int) -> Scaling | None:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if fields.text("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # named so in Phi-3's first configurations
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(parameters.number("factor"))
    if kind == "dynamic":
        return DynamicScaling()
    if kind == "llama3":
        return _llama3(fields, parameters)
    if kind == "yarn":
        return _yarn(fields, parameters)
    if kind == "longrope":
        return _long(fields, parameters, dimensions)
    raise ModelError(
        f"rope_type is {shown(kind)}: only default, linear, dynamic, llama3, yarn and longrope are supported"
    )


def _original_length(fields: Fields, parameters: Fields) -> int:
    """Return the length before scaling. A top-level field takes precedence, as in transformers."""
    beside = fields.optional_integer("original_max_position_embeddings")
    if beside is not None:
        return beside
    return parameters.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))


def _llama3(fields: Fields, parameters: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_position_embeddings=_original_length(fields, parameters),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(f"high_freq_factor is {scaling.high_freq_factor}: expected more than low_freq_factor")
    return scaling


def _yarn(fields: Fields, parameters: Fields) -> YarnScaling:
    original = _original_length(fields, parameters)
    factor = parameters.number("factor", fields.integer("max_position_embeddings") / original)
    attention = parameters.optional_number("attention_factor")
    if attention is None:
        part, whole = parameters.optional_number("mscale"), parameters.optional_number("mscale_all_dim")
        attention = _magnitude(factor, part) / _magnitude(factor, whole) if part and whole else _magnitude(factor, 1)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.number("beta_fast", 32),
        beta_slow=parameters.number("beta_slow", 1),
        rounded=parameters.flag("truncate", True),
    )


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _long(fields: Fields, parameters: Fields, dimensions: int) -> LongScaling:
    original = _original_length(fields, parameters)
    factor = parameters.number("factor", fields.integer("max_position_embeddings") / original)
    attention = parameters.optional_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        short_factors=parameters.numbers("short_factor", dimensions // 2),
        long_factors=parameters.numbers("long_factor", dimensions // 2),
        original_max_position_embeddings=original,
        attention_factor=attention,
    )
