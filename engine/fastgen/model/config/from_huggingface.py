"""Build a model's architecture from a Hugging Face config.json.

The error for an unsupported model names the unsupported field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import Activation, ModelArchitecture
from fastgen.model.config.fields import Fields
from fastgen.model.config.huggingface_families import FAMILIES, Family
from fastgen.model.config.rope import longest_sequence
from fastgen.model.config.rope_from_huggingface import rope_configs

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Formats whose scales of keys and values `fastgen.model.checkpoint.kv_scales` reads.
_KV_FORMATS = ("compressed-tensors", "modelopt")
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def architecture_from_huggingface(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> ModelArchitecture:
    """Return the architecture that the config.json of a native family describes (see `is_native`).

    generation_config.json may add end tokens.

    Raises:
        ModelError: naming the unsupported field.
    """
    family = _family(config)
    try:
        return _describe(family, config, generation_config or {})
    except ModelError as error:
        raise ModelError(f"config.json: {error}") from None


def _describe(family: Family, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelArchitecture:
    fields = Fields(config)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or hidden // heads)
    ropes = rope_configs(config, head_dim, family.theta, partial=family.partial_rotary)
    length = longest_sequence(fields.integer("max_position_embeddings", 2048), ropes)
    features = {"attention_scale": head_dim**-0.5, **family.describe(config, fields)}
    features["layers"] = tuple(layer.within(length) for layer in features["layers"])
    has_head = family.base_class not in (config.get("architectures") or ())
    return ModelArchitecture(
        name=config["model_type"],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        mlp_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_configs=ropes,
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied) or not has_head,
        has_head=has_head,
        eos_token_ids=token_ids(config.get("eos_token_id")) | token_ids(generation_config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
        activation=_ACTIVATIONS[family.activation],
        **features,
    )


def _family(config: Mapping[str, Any]) -> Family:
    """Return the model's family; reject fields that no family supports."""
    family = FAMILIES[config["model_type"]]
    quantization = config.get("quantization_config")
    if quantization and not _quantises_only_kv_cache(quantization):
        raise ModelError("config.json: quantization_config is set: quantised checkpoints are not served, use GGUF")
    if config.get("is_causal") is False:
        raise ModelError("config.json: is_causal is false: only causal attention is served")
    activation = config.get(family.activation_field) or family.activation
    if activation != family.activation:
        raise ModelError(
            f"config.json: {family.activation_field} is {activation!r}: only {family.activation} is served"
        )
    return family


def _quantises_only_kv_cache(quantization: Mapping[str, Any]) -> bool:
    """Return whether config.json quantises only keys and values, to float8 with one static scale for each layer."""
    scheme = quantization.get("kv_cache_scheme")
    if quantization.get("quant_method") not in _KV_FORMATS or not scheme:
        return False
    if quantization.get("config_groups") or quantization.get("quant_algo"):
        return False
    return all(scheme.get(name, value) == value for name, value in _KV_SCHEME.items())


def token_ids(value: Any) -> frozenset[int]:
    """Return the tokens of an `eos_token_id`, which may be None, a number or a list."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
