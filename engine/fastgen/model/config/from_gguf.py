"""Build a model's architecture from a GGUF file. An error names the key at fault.

Keys and tensors are those of llama.cpp's converter (its folder `conversion`).
"""

from __future__ import annotations

from fastgen.model import ModelError
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.gguf_families import FAMILIES, Features
from fastgen.model.config.gguf_keys import reject_unread_keys
from fastgen.model.config.rope import longest_sequence
from fastgen.model.config.rope_from_gguf import Contents, rope_configs
from fastgen.text.tokenizer_formats.gguf_vocabulary import GGUFVocabulary


def architecture_from_gguf(file: Contents) -> ModelArchitecture:
    """Return the architecture that a GGUF file describes.

    Raises:
        ConfigError: naming a damaged key of the tokenizer.
        ModelError: naming the key or tensor that is missing, invalid or not supported.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"general.architecture is {shown(kind)}: this engine serves {', '.join(FAMILIES)}")
    if Fields(metadata).count("split.count") > 1:
        raise ModelError(f"split.count is {metadata['split.count']}: merge the files with llama-gguf-split --merge")
    if Fields(metadata).text("general.type", "model") != "model":
        raise ModelError(f"general.type is {shown(metadata['general.type'])}: only models are supported")
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
        raise ModelError(f"{fields.name_of('attention.causal')} is false: only causal attention is supported")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if fields.integer(name, head_dim) != head_dim:
            raise ModelError(
                f"{fields.name_of(name)} is {fields.integer(name)}, not the head size {head_dim}: not supported"
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
    ends = GGUFVocabulary.of(metadata).end_tokens
    return ModelArchitecture(
        vocab_size=vocab_size,
        hidden_size=hidden,
        # A file whose layers all have experts may leave it out.
        mlp_size=fields.integer("feed_forward_length", 1 if features["layers"][0].experts else None),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_configs=ropes,
        tie_word_embeddings="output.weight" not in names,
        eos_token_ids=frozenset(token for token in ends if token < vocab_size),
        **features,
    )


def _kv_heads(fields: Fields, heads: int) -> int:
    """Return the number of key-value heads, which may be listed for each layer."""
    name = "attention.head_count_kv"
    if not isinstance(fields.value(name), list):
        return fields.integer(name, heads)
    counts = fields.integers(name) or []
    if len(set(counts)) != 1:
        raise ModelError(f"{fields.name_of(name)} is {shown(counts)}: all layers must have as many key-value heads")
    return Fields({fields.name_of(name): counts[0]}).integer(fields.name_of(name))
