"""A model's description from a GGUF file. Whatever would be served wrong is refused by name.

Keys and tensors are those that llama.cpp's converter writes (its folder `conversion`), and what they do not say is what
its model loaders take for granted (`src/models`): patterns of windows, Gemma's scale of scores, renormalised experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.architecture import Experts, LayerKind, ModelArchitecture
from fastgen.model.config.fields import Fields
from fastgen.model.config.from_huggingface import without_idle_window
from fastgen.model.config.rope_from_gguf import Contents, rotaries
from fastgen.model.config.rope_from_huggingface import longest

Features = dict[str, Any]  # fields of ModelArchitecture


def architecture_from_gguf(file: Contents) -> ModelArchitecture:
    """The description that a GGUF file holds.

    Raises:
        ModelError: naming the key at fault.
    """
    metadata, names = file.metadata, frozenset(file.tensor_names())
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ModelError(f"general.architecture is {kind!r}: this engine serves {', '.join(_FAMILIES)}")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"split.count is {metadata['split.count']}: merge the files with llama-gguf-split --merge")
    fields = Fields(metadata, prefix=f"{kind}.")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{kind}.attention.value_length is {fields.integer('attention.value_length')}, not the head size "
            f"{head_dim}: not served"
        )
    rotary = rotaries(file, fields, head_dim)
    length = longest(fields.integer("context_length"), rotary)
    features: Features = {
        "attention_scale": head_dim**-0.5,
        "qkv_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & names),
        "output_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        **_FAMILIES[kind](fields),
    }
    features["layers"] = tuple(without_idle_window(layer, length) for layer in features["layers"])
    return ModelArchitecture(
        vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        # A file whose layers all have experts may leave it out.
        mlp_size=fields.integer("feed_forward_length", 1 if features["layers"][0].experts else None),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rotaries=rotary,
        tie_word_embeddings="output.weight" not in names,
        eos_token_ids=_ends(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        **features,
    )


def _llama(fields: Fields) -> Features:
    """Llama, and what shares its name there: SmolLM, Mistral, and with experts Mixtral."""
    if not fields.count("expert_count"):
        return {"name": "llama", "layers": _layers(fields, _window(fields))}
    experts = _experts(fields, intermediate_size=fields.integer("feed_forward_length"), normalised=True)
    return {"name": "mixtral", "layers": _layers(fields, _window(fields), experts)}


def _phi3(fields: Fields) -> Features:
    return {"name": "phi3", "layers": _layers(fields, _window(fields))}


def _plain(name: str, **features: Any) -> Callable[[Fields], Features]:
    """Families without windows and experts."""
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
    return {"name": "qwen3_moe", "layers": _unwindowed(fields, experts), "qk_norm": True}


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
    # Two sets of rotary positions: the first for layers that see all, the second for those with a window.
    layers = _alternating(fields, window=fields.optional_integer("attention.sliding_window"), period=6, rotary=1)
    return {
        "name": "gemma3_text",
        "layers": layers,
        "qk_norm": True,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
        **_gemma(fields, is_27b=len(layers) == 62),
    }


def _gemma(fields: Fields, *, is_27b: bool) -> Features:
    """What Gemma 2 and 3 share. The converter has added norms' 1 to their weights, so there is no offset."""
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    per_head = hidden // heads if is_27b else fields.integer("attention.key_length", hidden // heads)
    return {
        "activation": "gelu_tanh",
        "sandwich_norms": True,
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
    return (LayerKind(window, experts=experts),) * fields.integer("block_count")


def _alternating(fields: Fields, *, window: int | None, period: int, rotary: int = 0) -> tuple[LayerKind, ...]:
    """Of `period` layers all but the last have the window, and rotary positions of number `rotary`."""
    count = fields.integer("block_count")
    if window is None:
        return (LayerKind(),) * count
    period = fields.integer("attention.sliding_window_pattern", period)
    windowed = LayerKind(window, rotary=rotary)
    return tuple(windowed if (index + 1) % period else LayerKind() for index in range(count))


def _window(fields: Fields) -> int | None:
    """The window of every layer; 0 stands for none."""
    return fields.count("attention.sliding_window") or None


def _unwindowed(fields: Fields, experts: Experts | None = None) -> tuple[LayerKind, ...]:
    """Layers of a family whose files say nothing of which layers would have a window."""
    window = _window(fields)
    if window is not None and window < fields.integer("context_length"):
        name = fields.name_of("attention.sliding_window")
        raise ModelError(f"{name} is {window}: windows of this family are not served from GGUF files")
    return _layers(fields, None, experts)


def _ends(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The tokens named as ends, and those that end a turn by their text, as llama.cpp finds them.

    A GGUF file has no generation_config.json, where Hugging Face lists them.
    """
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    marked = [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in _MARKED and token in _TURN_ENDS
    ]
    return frozenset(int(token) for token in (*named, *marked) if token is not None)


_MARKED = (3, 4)  # control and user-defined tokens
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})

_FAMILIES: Mapping[str, Callable[[Fields], Features]] = {
    "llama": _llama,
    "qwen2": _plain("qwen2"),
    "qwen3": _plain("qwen3", qk_norm=True),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
