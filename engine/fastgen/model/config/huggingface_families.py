"""Families of native models in Hugging Face format: how each differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import (
    MOST_LAYERS,
    DeltaRule,
    Experts,
    Heads,
    LayerEmbeddings,
    LayerKind,
    SigmoidRouting,
)
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.rope import QueryScaling
from fastgen.model.config.rope_from_huggingface import gemma4_rope_configs, query_scaling, rope_type

Config = Mapping[str, Any]
Features = dict[str, Any]  # fields of ModelArchitecture
Describe = Callable[[Fields], Features]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CHUNKED = "chunked_attention"


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
        draft_layers: field with the number of layers behind the last, which draft tokens and are not used.
        draft_tensors: prefixes of the names of other tensors that draft tokens, which are not used either.
    """

    model_class: str
    describe: Describe
    defaults: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    activation: str = "silu"
    activation_field: str = "hidden_act"
    draft_layers: str | None = None
    draft_tensors: tuple[str, ...] = ()

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


def draft_prefixes(config: Config, num_layers: int) -> tuple[str, ...]:
    """Return the prefixes of the names of tensors that draft tokens (multi-token prediction)."""
    family = FAMILIES[config["model_type"]]
    name = family.draft_layers
    count = 0 if name is None else Fields(config, defaults={name: 1}).count(name)
    layers = (f"model.layers.{num_layers + index}." for index in range(min(count, MOST_LAYERS)))
    return (*family.draft_tensors, *layers)


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
    return {"layers": _qwen_layers(fields), "qk_norm": "heads", **_attention_bias(fields)}


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
    return {"layers": layers, "qk_norm": "heads", **_attention_bias(fields)}


def _qwen3_next(fields: Fields) -> Features:
    shared = fields.integer("shared_expert_intermediate_size")
    return {"layers": _linear_layers(fields, _qwen_experts(fields, shared)), **_qwen_hybrid(fields)}


def _qwen3_5(fields: Fields) -> Features:
    return {"layers": _linear_layers(fields, [None] * _count(fields)), **_qwen_hybrid(fields)}


def _qwen3_5_moe(fields: Fields) -> Features:
    experts = Experts(
        count=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalised=True,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
    )
    layers = _linear_layers(fields, [experts] * _count(fields))
    return {"layers": layers, "mlp_size": experts.intermediate_size, **_qwen_hybrid(fields)}


def _qwen_hybrid(fields: Fields) -> Features:
    """Return the features that Qwen3-Next and Qwen3.5 share."""
    return {"norm_offset": 1.0, "qk_norm": "heads", "gated_attention": True, **_attention_bias(fields)}


def _linear_layers(fields: Fields, experts: Sequence[Experts | None]) -> tuple[LayerKind, ...]:
    """Return the layers. By default, every `full_attention_interval`-th one has attention."""
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads is {value_heads}: expected a multiple of linear_num_key_heads, {key_heads}"
        )
    delta = DeltaRule(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel_size=fields.integer("linear_conv_kernel_dim"),
    )
    interval = fields.integer("full_attention_interval", 4)
    default = [_LINEAR if (index + 1) % interval else _FULL for index in range(_count(fields))]
    types = _layer_types(fields, default, (_FULL, _LINEAR))
    if _FULL not in types:
        raise ModelError(f"layer_types has no {_FULL}: models without a KV cache are not supported")
    return tuple(
        LayerKind(experts=mixture, delta=delta if kind == _LINEAR else None)
        for kind, mixture in zip(types, experts, strict=True)
    )


def _glm4_moe(fields: Fields) -> Features:
    """The first layers are dense. Tensors of layers that draft tokens follow the others (`draft_layers`)."""
    width, count = fields.integer("moe_intermediate_size"), _alias(fields, "n_routed_experts", "num_local_experts")
    experts = Experts(
        count=fields.integer(count),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalised=fields.flag("norm_topk_prob"),
        shared_intermediate_size=width * fields.count("n_shared_experts"),
        shared_gate=False,
        sigmoid=SigmoidRouting(
            groups=fields.integer("n_group"),
            used_groups=fields.integer("topk_group"),
            scale=fields.number("routed_scaling_factor"),
        ),
    )
    if not experts.has_valid_groups:
        raise ModelError(
            f"{count} is {experts.count}, n_group {fields.integer('n_group')} and topk_group "
            f"{fields.integer('topk_group')}: expected equal groups of at least two "
            "experts, and enough experts per token in those used"
        )
    dense = fields.count("first_k_dense_replace")
    mixtures = [None if index < dense else experts for index in range(_count(fields))]
    return {
        "layers": _same_layers(fields, None, mixtures),
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": "heads" if fields.flag("use_qk_norm") else None,
    }


def _minimax_m2(fields: Fields) -> Features:
    # Fields of published files that transformers does not read.
    if not fields.flag("use_qk_norm", True) or fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise ModelError("use_qk_norm is false, or scoring_func is not sigmoid: not supported in minimax_m2 models")
    experts = Experts(
        count=fields.integer(_alias(fields, "num_local_experts", "num_experts")),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
        sigmoid=SigmoidRouting(),
    )
    return {"layers": _same_layers(fields, None, [experts] * _count(fields)), "qk_norm": "whole"}


def _gpt_oss(fields: Fields) -> Features:
    # transformers defaults to 1.702 and 7, and published files state only the latter.
    for name, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(name, expected) != expected:
            raise ModelError(f"{name} is {fields.number(name)}: only {expected} is supported")
    experts = Experts(
        count=fields.integer(_alias(fields, "num_local_experts", "num_experts")),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
        router_bias=True,
    )
    types = [_FULL if index % 2 else _SLIDING for index in range(_count(fields))]
    return {
        "layers": _layers(fields, types, fields.optional_integer("sliding_window"), [experts] * len(types)),
        "activation": "clamped_swiglu",
        "mlp_bias": True,
        "attention_sinks": True,
        **_attention_bias(fields),
    }


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
    return {"layers": _with_local_rope(layers), "qk_norm": "heads", **_gemma(fields)}


def _gemma(fields: Fields) -> Features:
    """Return the features that Gemma 2 and 3 share."""
    return {
        **_attention_bias(fields),
        "norm_offset": 1.0,
        "output_norms": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def _gemma4(fields: Fields) -> Features:
    experts = None
    if fields.flag("enable_moe_block"):
        experts = Experts(
            count=fields.integer("num_experts"),
            top_k=fields.integer("top_k_experts"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            normalised=True,
            beside_mlp=True,
        )
    size, vocabulary = fields.count("hidden_size_per_layer_input"), fields.integer("vocab_size_per_layer_input")
    if size and vocabulary < fields.integer("vocab_size"):
        raise ModelError(f"vocab_size_per_layer_input is {vocabulary}: expected at least vocab_size")
    return {
        "layer_embeddings": LayerEmbeddings(vocabulary, size) if size else None,
        **_gemma4_unified(fields, experts),
    }


def _gemma4_unified(fields: Fields, experts: Experts | None = None) -> Features:
    count, window, width = _count(fields), fields.integer("sliding_window"), fields.integer("intermediate_size")
    default = [_SLIDING if (index + 1) % 6 else _FULL for index in range(count)]
    types = [*_layer_types(fields, default, (_FULL, _SLIDING))[:-1], _FULL]  # as in transformers, always the last
    own, full = _gemma4_heads(fields, types)
    sources = _layers_with_keys(types, count - fields.count("num_kv_shared_layers"))
    are_keys_values, is_doubled = fields.flag("attention_k_eq_v"), fields.flag("use_double_wide_mlp")
    layers = tuple(
        LayerKind(
            window if kind == _SLIDING else None,
            rope=int(kind == _SLIDING),
            experts=experts,
            heads=full if kind == _FULL and full != own else None,
            kv_layer=source,
            keys_as_values=kind == _FULL and are_keys_values,
            mlp_size=2 * width if is_doubled and source is not None else None,
        )
        for kind, source in zip(types, sources, strict=True)
    )
    return {
        "layers": layers,
        "rope_configs": gemma4_rope_configs(fields, full.head_dim, own.head_dim),
        "output_norms": True,
        "qk_norm": "heads",
        "value_norm": True,
        "attention_scale": 1.0,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
        "layer_scales": True,
        **_attention_bias(fields),
    }


def _gemma4_heads(fields: Fields, types: Sequence[str]) -> tuple[Heads, Heads]:
    """Return the heads of layers with a window, and of those with full attention.

    transformers 5.23 writes the latter for each layer into `per_layer_config`, which takes precedence; files of earlier
    versions have two fields.
    """
    own = Heads(fields.integer("num_key_value_heads"), fields.integer("head_dim"))
    kv_heads = fields.optional_integer("num_global_key_value_heads")
    changes: Mapping[str, Any] = {"head_dim": fields.integer("global_head_dim")}
    if kv_heads is not None and fields.flag("attention_k_eq_v"):
        changes = {**changes, "num_key_value_heads": kv_heads}
    if fields.has("per_layer_config"):
        by_layer = fields.mapping("per_layer_config")
        full = [index for index, kind in enumerate(types) if kind == _FULL]
        layers = sorted(int(key) if key.isdecimal() else -1 for key in by_layer)  # they are padded with zeros
        changes = next(iter(by_layer.values()), {})
        is_of_heads = isinstance(changes, Mapping) and changes.keys() <= {"head_dim", "num_key_value_heads"}
        are_alike = not by_layer or (layers == full and all(each == changes for each in by_layer.values()))
        if not is_of_heads or not are_alike:
            raise ModelError(
                f"per_layer_config is {shown(by_layer)}: expected other heads of just the layers with {_FULL} in "
                "layer_types"
            )
    stated = Fields(changes, "", {"head_dim": own.head_dim, "num_key_value_heads": own.num_kv_heads})
    return own, Heads(stated.integer("num_key_value_heads"), stated.integer("head_dim"))


def _layers_with_keys(types: Sequence[str], first_shared: int) -> list[int | None]:
    """Return the layer whose keys and values each layer from `first_shared` on attends to: the last before of its type.

    Raises:
        ModelError: if there is none.
    """
    last = {kind: index for index, kind in enumerate(types[: max(0, first_shared)])}
    if not {*types} <= last.keys():
        raise ModelError(
            f"num_kv_shared_layers is {len(types) - first_shared}: no earlier layer of the same type is left"
        )
    return [None if index < first_shared else last[kind] for index, kind in enumerate(types)]


def _llama4(fields: Fields) -> Features:
    """Layers with positions attend within chunks, those without scale their queries by position instead."""
    count, size = _count(fields), fields.optional_integer("attention_chunk_size")
    rotates = _rotated_layers(fields)
    types = _layer_types(fields, [_CHUNKED if has else _FULL for has in rotates], (_FULL, _CHUNKED))
    if _CHUNKED in types and size is None:
        raise ModelError(f"layer_types has {_CHUNKED}, but no attention_chunk_size is set")
    width, step = fields.integer("intermediate_size"), fields.integer("interleave_moe_layer_step")
    experts = Experts(
        count=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalised=False,
        shared_intermediate_size=width,
        shared_gate=False,
        sigmoid=SigmoidRouting(corrected=False),
        scales_inputs=True,
    )
    sparse = fields.integers("moe_layers")
    if sparse is None:
        sparse = [*range(step - 1, count, step)]
    layers = tuple(
        LayerKind(
            rope=int(not rotates[index]),
            experts=experts if index in sparse else None,
            chunk=size if kind == _CHUNKED else None,
            scales_queries=not rotates[index],
        )
        for index, kind in enumerate(types)
    )
    scaling = QueryScaling(fields.number("attn_scale"), fields.integer("floor_scale"), offset=1)
    has_norm = fields.flag("use_qk_norm")
    if has_norm and rope_type(fields) not in ("default", "linear", "llama3"):
        raise ModelError(f"rope_type is {rope_type(fields)}: models of type llama4_text are not supported with it")
    return {
        "layers": layers,
        "mlp_size": fields.integer("intermediate_size_mlp"),
        "qk_norm": "unit" if has_norm else None,
        "query_scaling": scaling if fields.value("attn_temperature_tuning") else None,
        **_attention_bias(fields),
    }


def _rotated_layers(fields: Fields) -> list[int]:
    """Return 1 for each layer with rotary positions, and 0 for each without."""
    count, interval = _count(fields), fields.integer("no_rope_layer_interval")
    rotates = fields.integers("no_rope_layers")
    if not rotates:  # Llama 4's published files have an empty list
        return [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotates) != count:
        raise ModelError(f"no_rope_layers lists {len(rotates)} layers, but num_hidden_layers is {count}")
    return rotates


def _smollm3(fields: Fields) -> Features:
    """Some layers have no positions, and only these have a window if it is enabled."""
    rotates, window = _rotated_layers(fields), _enabled_window(fields)
    layers = _layers(fields, [_FULL if has_rope or not window else _SLIDING for has_rope in rotates], window)
    # The second RopeConfig does not rotate.
    layers = tuple(LayerKind(layer.window, int(not has)) for layer, has in zip(layers, rotates, strict=True))
    return {"layers": layers, "mlp_bias": fields.flag("mlp_bias"), **_attention_bias(fields)}


def _olmo2(fields: Fields) -> Features:
    return {"layers": _same_layers(fields, None), **_olmo(fields)}


def _olmo3(fields: Fields) -> Features:
    types = [_SLIDING if (index + 1) % 4 else _FULL for index in range(_count(fields))]
    layers = _layers(fields, types, fields.optional_integer("sliding_window"))
    return {"layers": _with_local_rope(layers), **_olmo(fields)}


def _olmo(fields: Fields) -> Features:
    """Return the features that OLMo 2 and 3 share."""
    return {"input_norms": False, "output_norms": True, "qk_norm": "whole", **_attention_bias(fields)}


def _olmoe(fields: Fields) -> Features:
    experts = Experts(
        count=fields.integer(_alias(fields, "num_experts", "num_local_experts")),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=fields.flag("norm_topk_prob"),
    )
    layers = _same_layers(fields, None, [experts] * _count(fields))
    return {"layers": layers, "qk_norm": "whole", **_attention_bias(fields)}


def _seed_oss(fields: Fields) -> Features:
    return {
        "layers": _same_layers(fields, None),
        "qkv_bias": fields.flag("attention_bias"),
        "output_bias": fields.flag("attention_out_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
    }


def _granite(fields: Fields) -> Features:
    return {"layers": _same_layers(fields, None), "mlp_bias": fields.flag("mlp_bias"), **_granite_factors(fields)}


def _granite_moe(fields: Fields) -> Features:
    layers = _same_layers(fields, None, [_granite_experts(fields)] * _count(fields))
    return {"layers": layers, **_granite_factors(fields)}


def _granite_hybrid(fields: Fields) -> Features:
    """Granite 4 without Mamba layers. Without experts, what is beside them in other models is a plain MLP."""
    if not fields.has("layer_types"):
        raise ModelError("layer_types is missing, so all layers are Mamba layers: these are not supported")
    types = _layer_types(fields, [_FULL] * _count(fields), (_FULL, "attention"))
    position = fields.text("position_embedding_type", "nope")
    if position not in ("rope", "nope"):
        raise ModelError(f"position_embedding_type is {shown(position)}: only rope and nope are supported")
    shared = fields.integer("shared_intermediate_size")
    experts = _granite_experts(fields, shared) if fields.count("num_local_experts") else None
    return {"layers": (LayerKind(experts=experts),) * len(types), "mlp_size": shared, **_granite_factors(fields)}


def _granite_experts(fields: Fields, shared: int = 0) -> Experts:
    return Experts(
        count=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
        shared_intermediate_size=shared,
        shared_gate=False,
    )


def _granite_factors(fields: Fields) -> Features:
    """Return the scaling factors of Granite models."""
    return {
        "attention_scale": fields.number("attention_multiplier"),
        "embedding_scale": fields.number("embedding_multiplier"),
        "residual_scale": fields.number("residual_multiplier"),
        "logit_scale": 1 / fields.number("logits_scaling"),
        **_attention_bias(fields),
    }


def _ernie(fields: Fields) -> Features:
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.flag("use_bias"))
    return {"layers": _same_layers(fields, None), **biases}


def _glm(fields: Fields) -> Features:
    return {"layers": _same_layers(fields, None), "qkv_bias": fields.flag("attention_bias")}


def _glm4(fields: Fields) -> Features:
    return {"output_norms": True, **_glm(fields)}


def _ministral(fields: Fields) -> Features:
    window = fields.optional_integer("sliding_window")
    return {"layers": _layers(fields, [_SLIDING if window else _FULL] * _count(fields), window)}


def _ministral3(fields: Fields) -> Features:
    if not fields.mapping("rope_parameters") and not fields.mapping("rope_scaling"):
        raise ModelError("rope_parameters is empty: leave it out for the default")
    return {"query_scaling": query_scaling(fields), **_windowed(fields)}


def _with_local_rope(layers: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Give layers with a window the second RopeConfig; the first is for layers with full attention."""
    return tuple(LayerKind(layer.window, rope=int(layer.window is not None)) for layer in layers)


def _attention_bias(fields: Fields) -> Features:
    return dict.fromkeys(("qkv_bias", "output_bias"), fields.flag("attention_bias"))


def _alias(fields: Fields, name: str, alias: str) -> str:
    """Return `alias`, another name of the field, if the file has it: it takes precedence, as in transformers."""
    return alias if fields.has(alias) else name


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
    types = _layer_types(fields, types, (_FULL, _SLIDING))
    for kind in types:
        if kind == _SLIDING and window is None:
            raise ModelError(
                f"layer_types has {_SLIDING}, but no sliding_window is set, or use_sliding_window is false"
            )
    return tuple(
        LayerKind(window if kind == _SLIDING else None, experts=experts[index] if experts else None)
        for index, kind in enumerate(types)
    )


def _layer_types(fields: Fields, default: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the types listed in config.json, otherwise the default."""
    types = fields.texts("layer_types")
    if types is None:
        return default
    if len(types) != len(default):
        raise ModelError(f"layer_types lists {len(types)} layers, but num_hidden_layers is {len(default)}")
    for kind in types:
        if kind not in known:
            raise ModelError(f"layer_types has {shown(kind)}: only {' and '.join(known)} are supported")
    return types


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
_GEMMA4_UNIFIED: dict[str, Any] = _COMMON | {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "attention_bias": False,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_GEMMA4: dict[str, Any] = _GEMMA4_UNIFIED | {
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
}
_SMOLLM3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA4: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "no_rope_layer_interval": 4,
    "use_qk_norm": True,
    "intermediate_size_mlp": 16_384,
    "interleave_moe_layer_step": 1,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
_OLMO: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
_OLMOE: dict[str, Any] = _OLMO | {
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
_SEED_OSS: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}
_GRANITE: dict[str, Any] = _LLAMA | dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
_GRANITE_MOE: dict[str, Any] = {name: value for name, value in _GRANITE.items() if name != "mlp_bias"} | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_ERNIE: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
_GLM: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_GLM4_MOE: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_MINIMAX_M2: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 196_608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5_000_000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_GPT_OSS: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_MINISTRAL3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "max_position_embeddings": 262_144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_QWEN_HYBRID: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_HYBRID_MOE: dict[str, Any] = _QWEN_HYBRID | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DRAFTS = ("mtp.",)
_GELU = ("gelu_pytorch_tanh", "hidden_activation")

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, _LLAMA),
    "llama4_text": Family("Llama4ForCausalLM", _llama4, _LLAMA4),
    "mistral": Family("MistralForCausalLM", _windowed, _MISTRAL),
    "phi3": Family("Phi3ForCausalLM", _windowed, _PHI3, partial_rotary=True),
    "ministral": Family("MinistralForCausalLM", _ministral, _MISTRAL),
    "ministral3": Family("Ministral3ForCausalLM", _ministral3, _MINISTRAL3),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, _SMOLLM3),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2, _OLMO),
    "olmo3": Family("Olmo3ForCausalLM", _olmo3, _OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096}),
    "olmoe": Family("OlmoeForCausalLM", _olmoe, _OLMOE),
    "seed_oss": Family("SeedOssForCausalLM", _seed_oss, _SEED_OSS),
    "granite": Family("GraniteForCausalLM", _granite, _GRANITE),
    "granitemoe": Family("GraniteMoeForCausalLM", _granite_moe, _GRANITE_MOE),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", _granite_hybrid, _GRANITE_MOE | {"shared_intermediate_size": 1024}
    ),
    "ernie4_5": Family("Ernie4_5ForCausalLM", _ernie, _ERNIE),
    "glm": Family("GlmForCausalLM", _glm, _GLM, partial_rotary=True),
    "glm4": Family("Glm4ForCausalLM", _glm4, _GLM, partial_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _QWEN_LAYERS),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, _QWEN_LAYERS | {"head_dim": 128, "attention_bias": False}),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _GEMMA2, False, *_GELU),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, _GEMMA3, False, *_GELU),
    "gemma4_text": Family("Gemma4ForCausalLM", _gemma4, _GEMMA4, False, *_GELU),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", _gemma4_unified, _GEMMA4_UNIFIED, False, *_GELU),
    "mixtral": Family("MixtralForCausalLM", _mixtral, _MIXTRAL),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", _glm4_moe, _GLM4_MOE, partial_rotary=True, draft_layers="num_nextn_predict_layers"
    ),
    "gpt_oss": Family("GptOssForCausalLM", _gpt_oss, _GPT_OSS),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", _minimax_m2, _MINIMAX_M2, partial_rotary=True),
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
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _qwen3_next,
        _QWEN_HYBRID_MOE
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1},
        partial_rotary=True,
        draft_tensors=_DRAFTS,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _qwen3_5,
        _QWEN_HYBRID | {"num_key_value_heads": 4},
        partial_rotary=True,
        draft_tensors=_DRAFTS,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _qwen3_5_moe,
        _QWEN_HYBRID_MOE | {"num_experts": 256, "num_experts_per_tok": 8},
        partial_rotary=True,
        draft_tensors=_DRAFTS,
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
