"""RoPE configuration from config.json.

transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`. If a file has both objects,
`rope_scaling` takes precedence, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoRotation,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

_OLMO3_THETA = 500_000.0
_FULL, _SLIDING = "full_attention", "sliding_attention"


# Families whose layers with full attention and with a window have rotary parameters of their own.
_BY_LAYER_TYPE = ("gemma3_text", "olmo3")
# Families in which some layers have no positions.
_UNROTATED = ("smollm3", "llama4_text")


def rope_configs(fields: Fields, head_dim: int, *, partial: bool) -> tuple[RopeConfig, ...]:
    """Return one RoPE configuration, or two.

    For Gemma 3 and OLMo 3 these are of full attention and of sliding-window attention, for SmolLM 3 and
    Llama 4 of layers with and without positions.

    `partial` tells whether the family supports partial_rotary_factor.

    Raises:
        ModelError: naming the field that is missing, invalid or not supported.
    """
    parameters, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    kind = fields.text("model_type")
    if kind not in _BY_LAYER_TYPE:
        for name, value in (scaling or parameters).items():
            if isinstance(value, Mapping):
                where = "rope_scaling" if scaling else "rope_parameters"
                raise ModelError(f"{where} has {shown(name)}: all layers must have the same rotary positions")
        rope = _rope(fields, Fields(scaling or parameters), head_dim, fields.number("rope_theta"), partial)
        if kind == "granitemoehybrid" and fields.text("position_embedding_type", "nope") == "nope":
            return (replace(rope, scaling=NoRotation()),)
        return (rope, replace(rope, scaling=NoRotation())) if kind in _UNROTATED else (rope,)
    if parameters and not parameters.keys() <= {_FULL, _SLIDING}:
        raise ModelError(f"rope_parameters is {shown(parameters)}: expected one object for {_FULL}, one for {_SLIDING}")
    by_type = Fields(parameters)
    full = {**by_type.mapping(_FULL), **scaling}
    # transformers reads the base of OLMo 3's layers with a window only from rope_parameters.
    local = fields.number("rope_local_base_freq") if kind == "gemma3_text" else _OLMO3_THETA
    return (
        _rope(fields, Fields(full), head_dim, fields.number("rope_theta"), partial),
        _rope(fields, Fields(by_type.mapping(_SLIDING)), head_dim, local, partial),
    )


def gemma4_rope_configs(fields: Fields, full_head_dim: int, sliding_head_dim: int) -> tuple[RopeConfig, ...]:
    """Return the RoPE configurations of Gemma 4's layers with full attention and with a window.

    transformers reads them only from `rope_parameters`.

    Raises:
        ModelError: naming the field that is missing, invalid or not supported.
    """
    if fields.mapping("rope_scaling"):
        raise ModelError("rope_scaling is set, but models of type gemma4_text have rope_parameters")
    parameters = fields.mapping("rope_parameters")
    if parameters.keys() != {_FULL, _SLIDING}:
        raise ModelError(f"rope_parameters is {shown(parameters)}: expected one object for {_FULL}, one for {_SLIDING}")
    by_type = Fields(parameters)
    return tuple(
        _proportional(fields, Fields(by_type.mapping(kind)), head_dim)
        for kind, head_dim in ((_FULL, full_head_dim), (_SLIDING, sliding_head_dim))
    )


def _proportional(fields: Fields, parameters: Fields, head_dim: int) -> RopeConfig:
    if parameters.text("rope_type", "default") != "proportional":
        return _rope(fields, parameters, head_dim, parameters.number("rope_theta"), partial=False)
    share = parameters.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise ModelError(f"partial_rotary_factor is {share}: expected at most 1")
    scaling = ProportionalScaling(share, parameters.number("factor", 1.0))
    return RopeConfig(_base(parameters, None), head_dim, scaling)


def _base(parameters: Fields, default: float | None) -> float:
    base = parameters.number("rope_theta", default)
    if base <= 1:
        raise ModelError(f"rope_theta is {base}: expected a number above 1")
    return base


def _rope(fields: Fields, parameters: Fields, head_dim: int, theta: float, partial: bool) -> RopeConfig:
    whole = fields.optional_integer("rotary_dim") if fields.text("model_type") == "minimax_m2" else None
    default = 1.0 if whole is None else whole / head_dim
    share = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", default))
    if share > 1 or (share < 1 and not partial):
        expected = "at most 1" if partial else "1, as models of this type rotate whole heads"
        raise ModelError(f"partial_rotary_factor is {share}: expected {expected}")
    dimensions = int(head_dim * share)
    return RopeConfig(_base(parameters, theta), dimensions, _scaling(fields, parameters, dimensions))


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


def rope_type(fields: Fields) -> str:
    """Return the type of the rotary embedding of a family in which all layers have the same."""
    parameters = Fields(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"))
    return parameters.text("rope_type", parameters.text("type", "default"))


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
    if scaling.high_freq_factor < scaling.low_freq_factor:  # they are equal in Llama 4 Scout
        raise ModelError(f"high_freq_factor is {scaling.high_freq_factor}: expected at least low_freq_factor")
    return scaling


def _yarn(fields: Fields, parameters: Fields) -> YarnScaling:
    original = _original_length(fields, parameters)
    # As in transformers, the factor must be stated; if it is null, it follows from the lengths.
    implied = fields.integer("max_position_embeddings") / original
    factor = parameters.number("factor", implied if parameters.is_null("factor") else None)
    attention = parameters.optional_number("attention_factor")
    if attention is None:
        part, whole = parameters.optional_number("mscale"), parameters.optional_number("mscale_all_dim")
        attention = _magnitude(factor, part) / _magnitude(factor, whole) if part and whole else _magnitude(factor, 1)
        # As in vLLM; transformers warns of both and ignores them. DeepSeek-R1-0528-Qwen3-8B and others have the first.
        attention = attention if parameters.flag("apply_yarn_scaling", True) else 1.0
        attention *= parameters.number("attn_factor", 1.0)
    extrapolation = parameters.number("extrapolation_factor", 1.0)
    if extrapolation != 1:
        raise ModelError(f"extrapolation_factor is {extrapolation}: YaRN is only supported with 1")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.number("beta_fast", 32),
        beta_slow=parameters.number("beta_slow", 1),
        rounded=parameters.flag("truncate", not parameters.is_null("truncate")),  # null is false, as in transformers
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


def query_scaling(fields: Fields) -> QueryScaling | None:
    """Return the scaling of queries in Ministral 3's `rope_parameters`, if any.

    Raises:
        ModelError: naming the field that is missing or invalid.
    """
    parameters = Fields(fields.mapping("rope_scaling") or fields.mapping("rope_parameters"))
    beta = parameters.optional_number("llama_4_scaling_beta")
    return None if beta is None else QueryScaling(beta, parameters.integer("original_max_position_embeddings"))
