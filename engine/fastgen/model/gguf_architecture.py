"""A model's description from a GGUF file's metadata. Whatever would be served wrong is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model.architecture import LayerKind, ModelArchitecture
from fastgen.model.errors import ModelError
from fastgen.model.fields import Fields
from fastgen.model.rotary import Rotary

_TYPES = ("llama",)


def architecture_from_gguf(metadata: Mapping[str, Any], *, tied: bool = True) -> ModelArchitecture:
    """The description that a GGUF file's metadata holds.

    Args:
        metadata: the file's key-value pairs.
        tied: whether the head shares the embedding, that is: the file has no `output.weight`.

    Raises:
        ModelError: naming the key at fault.
    """
    kind = metadata.get("general.architecture")
    if kind not in _TYPES:
        raise ModelError(f"general.architecture is {kind!r}: this engine serves {', '.join(_TYPES)}")
    _refuse(metadata)
    fields = Fields(metadata, prefix="llama.")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"llama.{key} is {fields.integer(key, head_dim)}, not the head size {head_dim}: not served"
            )
    ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
    return ModelArchitecture(
        name="llama",
        vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        mlp_size=fields.integer("feed_forward_length"),
        layers=(LayerKind(),) * fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        # A GGUF file has stretched frequencies as a tensor, rope_freqs.weight.
        rotaries=(Rotary(fields.number("rope.freq_base", 10000.0), head_dim),),
        attention_scale=head_dim**-0.5,
        tie_word_embeddings=tied,
        eos_token_ids=frozenset(int(token) for token in ends if token is not None),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _refuse(metadata: Mapping[str, Any]) -> None:
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"llama.rope.scaling.type is {scaling!r}: this rope scaling is not served")
    if metadata.get("llama.expert_count", 0):
        raise ModelError("llama.expert_count is set: mixtures of experts are not served from GGUF files")
    window = metadata.get("llama.attention.sliding_window", 0)
    if window and window < metadata.get("llama.context_length", 0):
        raise ModelError(f"llama.attention.sliding_window is {window}: sliding windows are not served from GGUF files")
