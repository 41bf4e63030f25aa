"""Build a model's architecture from a GGUF file. An error names the unsupported key.

Keys and tensors are those of llama.cpp's converter (its folder `conversion`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.from_huggingface import token_ids
from fastgen.model.config.gguf_families import FAMILIES, Features
from fastgen.model.config.gguf_keys import reject_unread_keys
from fastgen.model.config.rope import longest_sequence
from fastgen.model.config.rope_from_gguf import Contents, rope_configs


def architecture_from_gguf(file: Contents) -> ModelArchitecture:
    """Return the architecture that a GGUF file describes.

    Raises:
        ModelError: naming the unsupported key.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"general.architecture is {shown(kind)}: this engine serves {', '.join(FAMILIES)}")
    if Fields(metadata).count("split.count") > 1:
        raise ModelError(f"split.count is {metadata['split.count']}: merge the files with llama-gguf-split --merge")
    if Fields(metadata).text("general.type", "model") != "model":
        raise ModelError(f"general.type is {shown(metadata['general.type'])}: only models are served")
    fields = Fields(metadata, prefix=f"{kind}.")
    try:
        architecture = _describe(kind, file, fields)
    except ArithmeticError as error:  # numbers that are valid one by one
        raise ModelError(f"rotary positions or sizes cannot be computed ({error})") from None
    reject_unread_keys(metadata, fields)
    return architecture


def _describe(kind: str, file: Contents, fields: Fields) -> ModelArchitecture:
    metadata, names = file.metadata, frozenset(file.tensor_names())
    if not fields.flag("attention.causal", True):
        raise ModelError(f"{fields.name_of('attention.causal')} is false: only causal attention is served")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if fields.integer(name, head_dim) != head_dim:
            raise ModelError(
                f"{fields.name_of(name)} is {fields.integer(name)}, not the head size {head_dim}: not served"
            )
    ropes = rope_configs(file, fields, head_dim)
    length = longest_sequence(fields.integer("context_length"), ropes)
    features: Features = {
        "attention_scale": head_dim**-0.5,
        "qkv_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & names),
        "output_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        **FAMILIES[kind](fields),
    }
    features["layers"] = tuple(layer.within(length) for layer in features["layers"])
    vocab_size = fields.integer("vocab_size", len(Fields(metadata).texts("tokenizer.ggml.tokens") or ()))
    return ModelArchitecture(
        vocab_size=vocab_size,
        hidden_size=hidden,
        # A file whose layers all have experts may leave it out.
        mlp_size=fields.integer("feed_forward_length", 1 if features["layers"][0].experts else None),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_configs=ropes,
        tie_word_embeddings="output.weight" not in names,
        eos_token_ids=frozenset(token for token in _ends(metadata) if token < vocab_size),
        **features,
    )


def _ends(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens in the metadata, and end-of-turn tokens by their text, as llama.cpp does.

    Hugging Face lists the latter in generation_config.json, which GGUF files lack.
    """
    fields = Fields(metadata, prefix="tokenizer.ggml.")
    named = [fields.value(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = fields.texts("tokens") or (), fields.integers("token_type") or ()
    marked = [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in _MARKED and token in _TURN_ENDS
    ]
    return frozenset().union(*(token_ids(token) for token in (*named, *marked)))


_MARKED = (3, 4)  # control and user-defined tokens
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
