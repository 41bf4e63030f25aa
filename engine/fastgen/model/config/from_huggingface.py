"""Build a model's architecture from a Hugging Face config.json.

The error for a model that is not supported names the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import Activation, ModelArchitecture
from fastgen.model.config.end_tokens import end_tokens, eos_token_ids
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.huggingface_families import FAMILIES, Family
from fastgen.model.config.rope import longest_sequence
from fastgen.model.config.rope_from_huggingface import rope_configs
from fastgen.model.config.unsupported_fields import reject_unsupported_fields

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def architecture_from_huggingface(
    config: Mapping[str, Any], generation_ends: frozenset[int] | None, tokenizer_end: int | None = None
) -> ModelArchitecture:
    """Return the architecture that the config.json of a native family describes (see `is_native`).

    Args:
        config: content of config.json.
        generation_ends: end tokens of generation_config.json, if there is one.
        tokenizer_end: id of the tokenizer's `eos_token`; None if it has none. See `end_tokens`.

    Raises:
        ModelError: naming the field that is missing, invalid or not supported.
    """
    family = FAMILIES[config["model_type"]]
    # As in transformers, null is the default here.
    stated = {name: value for name, value in config.items() if value is not None or name != "rope_parameters"}
    fields = Fields(stated, defaults=family.defaults)
    try:
        _check_common(family, fields)
        architecture = _describe(family, fields, generation_ends or frozenset(), tokenizer_end)
        reject_unsupported_fields(fields)
    except ArithmeticError as error:  # numbers that are valid one by one
        raise ModelError(f"rotary positions or sizes cannot be computed ({error})") from None
    return architecture


def _describe(
    family: Family, fields: Fields, generation_ends: frozenset[int], tokenizer_end: int | None
) -> ModelArchitecture:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden // heads)
    features: dict[str, Any] = {"attention_scale": head_dim**-0.5, "activation": _ACTIVATIONS[family.activation]}
    features |= family.describe(fields)
    ropes = features.pop("rope_configs", None) or rope_configs(fields, head_dim, partial=family.partial_rotary)
    length = longest_sequence(fields.integer("max_position_embeddings"), ropes)
    features["layers"] = tuple(layer.within(length) for layer in features["layers"])
    has_head = family.base_class not in (fields.texts("architectures") or ())
    vocab_size = fields.integer("vocab_size")
    ends = end_tokens(eos_token_ids(fields.value("eos_token_id")), generation_ends, tokenizer_end)
    return ModelArchitecture(
        name=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden,
        mlp_size=features.pop("mlp_size", None) or fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_configs=ropes,
        tie_word_embeddings=fields.flag("tie_word_embeddings") or not has_head,
        has_head=has_head,
        eos_token_ids=frozenset(token for token in ends if token < vocab_size),
        **features,
    )


def _check_common(family: Family, fields: Fields) -> None:
    """Reject attention that is not causal, and other activations than the family's."""
    if not fields.flag("is_causal", True):
        raise ModelError("is_causal is false: only causal attention is supported")
    bidirectional = fields.value("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # tokens of text are causal if only images are not
        raise ModelError(f"use_bidirectional_attention is {shown(bidirectional)}: only causal attention is supported")
    activation = fields.text(family.activation_field, family.activation)
    if activation != family.activation:
        raise ModelError(f"{family.activation_field} is {shown(activation)}: only {family.activation} is supported")
