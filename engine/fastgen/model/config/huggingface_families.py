"""Families of native models in Hugging Face format: how each differs from Llama.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import Experts, LayerKind
from fastgen.model.config.fields import Fields

Config = Mapping[str, Any]
Features = dict[str, Any]  # fields of ModelArchitecture
Describe = Callable[[Config, Fields], Features]

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of Hugging Face.

    Attributes:
        model_class: the class of transformers that the engine reimplements.
        describe: returns the layers and other differences from Llama, given config.json.
        theta: default of rope_theta.
        partial_rotary: whether partial_rotary_factor may differ from 1.
        head_dim: default of head_dim; None means hidden size / heads.
        tied: default of tie_word_embeddings.
        activation: the only supported activation.
        activation_field: field of config.json that names the activation.
    """

    model_class: str
    describe: Describe
    theta: float = 10_000.0
    partial_rotary: bool = False
    head_dim: int | None = None
    tied: bool = False
    activation: str = "silu"
    activation_field: str = "hidden_act"

    @property
    def base_class(self) -> str:
        """The class of a checkpoint without an output head, as embedding models are."""
        return self.model_class.removesuffix("ForCausalLM") + "Model"


def is_native(config: Config) -> bool:
    """Return whether the model's type, and its class if named, is a native family.

    `architecture_from_huggingface` may still reject other fields of the configuration.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return False
    classes = config.get("architectures")
    return not classes or family.model_class in classes or family.base_class in classes


def _llama(config: Config, fields: Fields) -> Features:
    window = config.get("sliding_window")
    if window and window < config.get("max_position_embeddings", 0):
        raise ModelError(f"sliding_window is {window}: models of type llama have no sliding-window attention")
    mlp_bias = fields.flag("mlp_bias", False)
    return {"layers": _same_layers(fields, None), "mlp_bias": mlp_bias, **_attention_bias(fields)}


def _windowed(config: Config, fields: Fields) -> Features:
    """Mistral and Phi-3: the same window in every layer, if any."""
    window = fields.optional_integer("sliding_window")
    types = config.get("layer_types")
    if types is not None and set(types) != {_SLIDING if window else _FULL}:
        raise ModelError(f"layer_types mixes windows: not supported for models of type {config['model_type']}")
    return {"layers": _same_layers(fields, window)}


def _qwen2(config: Config, fields: Fields) -> Features:
    return {"layers": _qwen_layers(config, fields), "qkv_bias": True}


def _qwen3(config: Config, fields: Fields) -> Features:
    return {"layers": _qwen_layers(config, fields), "qk_norm": True, **_attention_bias(fields)}


def _mixtral(config: Config, fields: Fields) -> Features:
    experts = Experts(
        count=fields.integer("num_experts" if "num_experts" in config else "num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
    )
    return {"layers": _same_layers(fields, fields.optional_integer("sliding_window"), experts)}


def _qwen2_moe(config: Config, fields: Fields) -> Features:
    moe = _qwen_experts(config, fields, fields.integer("shared_expert_intermediate_size", 5632))
    window = _enabled_window(fields)
    last = fields.integer("max_window_layers", 28) if window else 0
    types = [_SLIDING if index % 2 == 0 and index < last else _FULL for index in range(len(moe))]
    layers = _layers(config, types, window, moe)
    return {"layers": layers, "qkv_bias": fields.flag("qkv_bias", True)}


def _qwen3_moe(config: Config, fields: Fields) -> Features:
    window = _enabled_window(fields)
    layers = tuple(LayerKind(window, experts=experts) for experts in _qwen_experts(config, fields, 0))
    return {"layers": layers, "qk_norm": True, **_attention_bias(fields)}


def _gemma2(config: Config, fields: Fields) -> Features:
    count = fields.integer("num_hidden_layers")
    types = [_FULL if index % 2 else _SLIDING for index in range(count)]
    return {
        "layers": _layers(config, types, fields.integer("sliding_window", 4096)),
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        **_gemma(config, fields),
    }


def _gemma3(config: Config, fields: Fields) -> Features:
    if config.get("attn_logit_softcapping") is not None:
        raise ModelError("attn_logit_softcapping is set: not supported for models of type gemma3_text")
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    count = fields.integer("num_hidden_layers")
    types = [_SLIDING if (index + 1) % pattern else _FULL for index in range(count)]
    layers = _layers(config, types, fields.integer("sliding_window", 4096))
    # The first RopeConfig is for layers with full attention, the second for layers with a window.
    layers = tuple(LayerKind(layer.window, rope=int(layer.window is not None)) for layer in layers)
    return {"layers": layers, "qk_norm": True, **_gemma(config, fields)}


def _gemma(config: Config, fields: Fields) -> Features:
    """Return the features that Gemma 2 and 3 share."""
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is true: only causal attention is served")
    return {
        **_attention_bias(fields),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _attention_bias(fields: Fields) -> Features:
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.flag("attention_bias", False))


def _enabled_window(fields: Fields) -> int | None:
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None


def _same_layers(fields: Fields, window: int | None, experts: Experts | None = None) -> tuple[LayerKind, ...]:
    return (LayerKind(window, experts=experts),) * fields.integer("num_hidden_layers")


def _qwen_layers(config: Config, fields: Fields) -> tuple[LayerKind, ...]:
    """Return the layers; if enabled, those from `max_window_layers` on have a sliding window."""
    window = _enabled_window(fields)
    first = fields.integer("max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
    count = fields.integer("num_hidden_layers")
    types = [_SLIDING if window and index >= first else _FULL for index in range(count)]
    return _layers(config, types, window)


def _qwen_experts(config: Config, fields: Fields, shared: int) -> list[Experts | None]:
    """Return each layer's experts.

    Every `decoder_sparse_step`-th layer that is not in `mlp_only_layers` has them.
    """
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = Experts(
        count=fields.integer(name),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", False),
        shared_intermediate_size=shared,
    )
    step, dense = fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return [
        None if index in dense or (index + 1) % step else experts
        for index in range(fields.integer("num_hidden_layers"))
    ]


def _layers(
    config: Config, types: Sequence[str], window: int | None, experts: Sequence[Experts | None] | None = None
) -> tuple[LayerKind, ...]:
    """Return layers of the types listed in config.json, otherwise of `types`."""
    listed = config.get("layer_types")
    if listed is not None:
        if len(listed) != len(types):
            raise ModelError(f"layer_types lists {len(listed)} layers, but num_hidden_layers is {len(types)}")
        types = listed
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise ModelError(f"layer_types has {kind!r}: only {_FULL} and {_SLIDING} are served")
        if kind == _SLIDING and window is None:
            raise ModelError(f"layer_types has {_SLIDING}, but no sliding_window is set or enabled")
    return tuple(
        LayerKind(window if kind == _SLIDING else None, experts=experts[index] if experts else None)
        for index, kind in enumerate(types)
    )


_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tied": True,
    "activation": "gelu_pytorch_tanh",
    "activation_field": "hidden_activation",
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _windowed),
    "phi3": Family("Phi3ForCausalLM", _windowed, partial_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, head_dim=128),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, **_GEMMA),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, theta=1_000_000.0, **_GEMMA),
    "mixtral": Family("MixtralForCausalLM", _mixtral, theta=1_000_000.0),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
}
