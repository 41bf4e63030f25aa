"""Families of native models in Hugging Face format: how each differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import MOST_LAYERS, Experts, LayerKind
from fastgen.model.config.fields import Fields, shown

Config = Mapping[str, Any]
Features = dict[str, Any]  # fields of ModelArchitecture
Describe = Callable[[Fields], Features]

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of Hugging Face.

    Attributes:
        model_class: the class of transformers that the engine reimplements.
        describe: returns the layers and other differences from Llama, given config.json.
        defaults: values of fields that config.json leaves out, as in transformers' configuration class.
        partial_rotary: whether partial_rotary_factor may differ from 1.
        activation: the only supported activation.
        activation_field: field of config.json that names the activation.
    """

    model_class: str
    describe: Describe
    defaults: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    activation: str = "silu"
    activation_field: str = "hidden_act"

    @property
    def base_class(self) -> str:
        """The class of a checkpoint without an output head, for example of an embedding model."""
        return self.model_class.removesuffix("ForCausalLM") + "Model"


def is_native(config: Config) -> bool:
    """Return whether the model's type, and its class if it names one, are those of a native family.

    `architecture_from_huggingface` may still reject other fields of the configuration.

    Raises:
        ModelError: if `architectures` is not a list of strings.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return False
    classes = Fields(config).texts("architectures")
    return not classes or family.model_class in classes or family.base_class in classes


def _llama(fields: Fields) -> Features:
    window = fields.count("sliding_window")
    if window and window < fields.integer("max_position_embeddings"):
        raise ModelError(f"sliding_window is {window}: models of type llama have no sliding-window attention")
    mlp_bias = fields.flag("mlp_bias")
    return {"layers": _same_layers(fields, None), "mlp_bias": mlp_bias, **_attention_bias(fields)}


def _windowed(fields: Fields) -> Features:
    """Mistral and Phi-3: the same window in every layer, if any."""
    return {"layers": _same_layers(fields, fields.optional_integer("sliding_window"))}


def _qwen2(fields: Fields) -> Features:
    return {"layers": _qwen_layers(fields), "qkv_bias": True}


def _qwen3(fields: Fields) -> Features:
    return {"layers": _qwen_layers(fields), "qk_norm": True, **_attention_bias(fields)}


def _mixtral(fields: Fields) -> Features:
    experts = Experts(
        count=fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
    )
    return {"layers": _same_layers(fields, fields.optional_integer("sliding_window"), [experts] * _count(fields))}


def _qwen2_moe(fields: Fields) -> Features:
    moe = _qwen_experts(fields, fields.integer("shared_expert_intermediate_size"))
    window = _enabled_window(fields)
    last = fields.count("max_window_layers") if window else 0
    types = [_SLIDING if index % 2 == 0 and index < last else _FULL for index in range(len(moe))]
    return {"layers": _layers(fields, types, window, moe), "qkv_bias": fields.flag("qkv_bias")}


def _qwen3_moe(fields: Fields) -> Features:
    layers = _same_layers(fields, _enabled_window(fields), _qwen_experts(fields, 0))
    return {"layers": layers, "qk_norm": True, **_attention_bias(fields)}


def _gemma2(fields: Fields) -> Features:
    types = [_FULL if index % 2 else _SLIDING for index in range(_count(fields))]
    return {
        "layers": _layers(fields, types, fields.integer("sliding_window")),
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        **_gemma(fields),
    }


def _gemma3(fields: Fields) -> Features:
    pattern = fields.integer("sliding_window_pattern", 6)
    types = [_SLIDING if (index + 1) % pattern else _FULL for index in range(_count(fields))]
    layers = _layers(fields, types, fields.integer("sliding_window"))
    # The first RopeConfig is for layers with full attention, the second for layers with a window.
    layers = tuple(LayerKind(layer.window, rope=int(layer.window is not None)) for layer in layers)
    return {"layers": layers, "qk_norm": True, **_gemma(fields)}


def _gemma(fields: Fields) -> Features:
    """Return the features that Gemma 2 and 3 share."""
    return {
        **_attention_bias(fields),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _attention_bias(fields: Fields) -> Features:
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.flag("attention_bias"))


def _count(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.integer("num_hidden_layers", most=MOST_LAYERS)


def _enabled_window(fields: Fields) -> int | None:
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None


def _same_layers(
    fields: Fields, window: int | None, experts: Sequence[Experts | None] | None = None
) -> tuple[LayerKind, ...]:
    """Return layers that all have the window, if any.

    Raises:
        ModelError: if `layer_types` says otherwise.
    """
    kind = _SLIDING if window else _FULL
    layers = _layers(fields, [kind] * _count(fields), window, experts)
    if any(layer.window != window for layer in layers):
        kind = fields.text("model_type")
        raise ModelError(f"layer_types differs from sliding_window: all layers of a {kind} model have the same window")
    return layers


def _qwen_layers(fields: Fields) -> tuple[LayerKind, ...]:
    """Return the layers. By default, those from `max_window_layers` on have the window, if it is enabled."""
    window, first = _enabled_window(fields), fields.count("max_window_layers")
    types = [_SLIDING if window and index >= first else _FULL for index in range(_count(fields))]
    return _layers(fields, types, window)


def _qwen_experts(fields: Fields, shared: int) -> list[Experts | None]:
    """Return each layer's experts.

    Every `decoder_sparse_step`-th layer that is not in `mlp_only_layers` has them.
    """
    is_usual = fields.has("num_experts")
    experts = Experts(
        count=fields.integer("num_experts" if is_usual or not fields.has("num_local_experts") else "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob"),
        shared_intermediate_size=shared,
    )
    step, dense = fields.integer("decoder_sparse_step"), frozenset(fields.integers("mlp_only_layers") or ())
    return [None if index in dense or (index + 1) % step else experts for index in range(_count(fields))]


def _layers(
    fields: Fields, types: Sequence[str], window: int | None, experts: Sequence[Experts | None] | None = None
) -> tuple[LayerKind, ...]:
    """Return layers of the types listed in config.json, otherwise of `types`."""
    listed = fields.texts("layer_types")
    if listed is not None:
        if len(listed) != len(types):
            raise ModelError(f"layer_types lists {len(listed)} layers, but num_hidden_layers is {len(types)}")
        types = listed
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise ModelError(f"layer_types has {shown(kind)}: only {_FULL} and {_SLIDING} are supported")
        if kind == _SLIDING and window is None:
            raise ModelError(
                f"layer_types has {_SLIDING}, but no sliding_window is set, or use_sliding_window is false"
            )
    return tuple(
        LayerKind(window if kind == _SLIDING else None, experts=experts[index] if experts else None)
        for index, kind in enumerate(types)
    )


# Defaults of fields that config.json may leave out. Sizes must be stated. There is no default of `eos_token_id`: the
# tokenizer names the token that ends a text.
_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LLAMA: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_PHI3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_MIXTRAL: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_QWEN: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_LAYERS: dict[str, Any] = _QWEN | {"max_window_layers": 28}
_QWEN_MOE: dict[str, Any] = _QWEN | {"norm_topk_prob": False, "decoder_sparse_step": 1}
_GEMMA: dict[str, Any] = _COMMON | {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, Any] = _GEMMA | {
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GELU = ("gelu_pytorch_tanh", "hidden_activation")

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, _LLAMA),
    "mistral": Family("MistralForCausalLM", _windowed, _MISTRAL),
    "phi3": Family("Phi3ForCausalLM", _windowed, _PHI3, partial_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _QWEN_LAYERS),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, _QWEN_LAYERS | {"head_dim": 128, "attention_bias": False}),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _GEMMA2, False, *_GELU),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, _GEMMA3, False, *_GELU),
    "mixtral": Family("MixtralForCausalLM", _mixtral, _MIXTRAL),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        _QWEN_MOE
        | {
            "max_window_layers": 28,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        _QWEN_MOE
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
