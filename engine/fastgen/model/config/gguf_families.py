"""Families of native models in GGUF files: how each differs from Llama.

What files leave out follows llama.cpp's model loaders (`src/models`): window patterns, Gemma's attention scale,
normalised experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import MOST_LAYERS, Experts, LayerKind
from fastgen.model.config.fields import Fields

Features = dict[str, Any]  # fields of ModelArchitecture

# By `ModelArchitecture.name`: families of which llama.cpp's converter permutes the rows of queries and keys, see
# `TensorLocation.paired_heads`.
PAIRED_FAMILIES = frozenset({"llama", "mixtral", "granite", "granitemoe"})


def _llama(fields: Fields) -> Features:
    """Describe Llama and the families stored under its name.

    These are SmolLM, Mistral and, if it has experts, Mixtral.
    """
    if not fields.count("expert_count"):
        return {"name": "llama", "layers": _layers(fields, _window(fields))}
    experts = _experts(fields, intermediate_size=fields.integer("feed_forward_length"), normalised=True)
    return {"name": "mixtral", "layers": _layers(fields, _window(fields), experts)}


def _phi3(fields: Fields) -> Features:
    return {"name": "phi3", "layers": _layers(fields, _window(fields))}


def _plain(name: str, **features: Any) -> Callable[[Fields], Features]:
    """Describe a family without windows and experts."""
    return lambda fields: {"name": name, "layers": _unwindowed(fields), **features}


def _qwen2_moe(fields: Fields) -> Features:
    whole = fields.integer("feed_forward_length")
    used = fields.integer("expert_used_count")
    experts = _experts(
        fields,
        intermediate_size=fields.integer("expert_feed_forward_length", whole // used),
        normalised=False,
        shared=fields.integer("expert_shared_feed_forward_length", whole),
    )
    return {"name": "qwen2_moe", "layers": _unwindowed(fields, experts)}


def _qwen3_moe(fields: Fields) -> Features:
    width = fields.integer("expert_feed_forward_length")
    experts = _experts(fields, intermediate_size=width, normalised=True)
    return {"name": "qwen3_moe", "layers": _unwindowed(fields, experts), "qk_norm": "heads"}


def _granite(fields: Fields) -> Features:
    """Describe Granite 3, and Granite 4 without Mamba layers."""
    return {"name": "granite", "layers": _unwindowed(fields), **_granite_factors(fields)}


def _granite_moe(fields: Fields) -> Features:
    shared, width = fields.count("expert_shared_feed_forward_length"), fields.integer("feed_forward_length")
    experts = replace(_experts(fields, intermediate_size=width, normalised=True, shared=shared), shared_gate=False)
    return {"name": "granitemoe", "layers": _unwindowed(fields, experts), **_granite_factors(fields)}


def _granite_factors(fields: Fields) -> Features:
    scale = fields.optional_number("attention.scale")
    return {
        "embedding_scale": fields.number("embedding_scale", 1.0),
        "residual_scale": fields.number("residual_scale", 1.0),
        "logit_scale": 1 / fields.number("logit_scale"),
        **({} if scale is None else {"attention_scale": scale}),
    }


def _gemma2(fields: Fields) -> Features:
    layers = _alternating(fields, window=fields.integer("attention.sliding_window", 4096), period=2)
    return {
        "name": "gemma2",
        "layers": layers,
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0),
        "logit_softcap": fields.number("final_logit_softcapping", 30.0),
        **_gemma(fields, is_27b=len(layers) == 46),
    }


def _gemma3(fields: Fields) -> Features:
    # The first RopeConfig is for layers with full attention, the second for layers with a window.
    layers = _alternating(fields, window=fields.optional_integer("attention.sliding_window"), period=6, rope=1)
    return {
        "name": "gemma3_text",
        "layers": layers,
        "qk_norm": "heads",
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
        **_gemma(fields, is_27b=len(layers) == 62),
    }


def _gemma(fields: Fields, *, is_27b: bool) -> Features:
    """Return the features that Gemma 2 and 3 share.

    The converter adds 1 to norm weights, so there is no offset.
    """
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    per_head = hidden // heads if is_27b else fields.integer("attention.key_length", hidden // heads)
    return {
        "activation": "gelu_tanh",
        "output_norms": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": per_head**-0.5,
    }


def _experts(fields: Fields, *, intermediate_size: int, normalised: bool, shared: int = 0) -> Experts:
    return Experts(
        count=fields.integer("expert_count"),
        top_k=fields.integer("expert_used_count"),
        intermediate_size=intermediate_size,
        normalised=fields.flag("expert_weights_norm", normalised),
        shared_intermediate_size=shared,
    )


def _layers(fields: Fields, window: int | None, experts: Experts | None = None) -> tuple[LayerKind, ...]:
    return (LayerKind(window, experts=experts),) * _count(fields)


def _count(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.integer("block_count", most=MOST_LAYERS)


def _alternating(fields: Fields, *, window: int | None, period: int, rope: int = 0) -> tuple[LayerKind, ...]:
    """Return layers of which every `period`-th has full attention; the others have the window and `rope`.

    The file may state another period, or list the layers.
    """
    count = _count(fields)
    if window is None:
        return (LayerKind(),) * count
    windowed, name = LayerKind(window, rope=rope), "attention.sliding_window_pattern"
    if isinstance(fields.value(name), list):  # whether each layer has a window
        flags = fields.flags(name, count)
    else:
        period = fields.integer(name, period)
        flags = tuple((index + 1) % period != 0 for index in range(count))
    return tuple(windowed if flag else LayerKind() for flag in flags)


def _window(fields: Fields) -> int | None:
    """Return the sliding window of every layer, or None; the file stores 0 for none."""
    return fields.count("attention.sliding_window") or None


def _unwindowed(fields: Fields, experts: Experts | None = None) -> tuple[LayerKind, ...]:
    """Return layers of a family whose files do not say which layers have a window."""
    window = _window(fields)
    if window is not None and window < fields.integer("context_length"):
        name = fields.name_of("attention.sliding_window")
        raise ModelError(f"{name} is {window}: windows of this family are not supported in GGUF files")
    return _layers(fields, None, experts)


# By general.architecture.
FAMILIES: Mapping[str, Callable[[Fields], Features]] = {
    "llama": _llama,
    "qwen2": _plain("qwen2"),
    "qwen3": _plain("qwen3", qk_norm="heads"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}

# By general.architecture: the types of config.json whose models are stored under it.
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    "llama": ("llama", "mistral", "mixtral"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen2moe": ("qwen2_moe",),
    "qwen3moe": ("qwen3_moe",),
    "phi3": ("phi3",),
    "granite": ("granite", "granitemoehybrid"),
    "granitemoe": ("granitemoe", "granitemoehybrid"),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3_text",),
}
