"""Checkpoints of models for images and text: which of them hold a decoder that this engine serves, and where.

Only the text part is served. config.json describes it in `text_config`; the tensors of the other parts are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.huggingface_families import FAMILIES

_LLAVA = tuple(
    f"{base}{part}" for base in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.", "image_newline")
)
_QWEN = ("model.visual.", "visual.", "mtp.")
_GEMMA4 = tuple(f"model.{part}." for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"))
_IDEFICS = ("model.vision_model.", "model.connector.")


@dataclass(frozen=True, slots=True)
class Multimodal:
    """One model_type of transformers whose text part may be served.

    Attributes:
        model_class: the class of its checkpoints.
        text: model_type of a `text_config` that states none.
        other_parts: prefixes of the tensors that are not the text part's.
        ties: default of its tie_word_embeddings.
        is_flat: whether files of earlier versions have the text part's fields beside `vision_config`.
    """

    model_class: str
    text: str
    other_parts: tuple[str, ...]
    ties: bool = False
    is_flat: bool = False


MULTIMODAL: Mapping[str, Multimodal] = {
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text", _LLAVA, ties=True),
    "gemma4": Multimodal("Gemma4ForConditionalGeneration", "gemma4_text", _GEMMA4, ties=True),
    "gemma4_unified": Multimodal(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        (*_GEMMA4, "model.vision_embedder."),
        ties=True,
    ),
    "llama4": Multimodal("Llama4ForConditionalGeneration", "llama4_text", ("vision_model.", "multi_modal_projector.")),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral", _LLAVA, ties=True),
    "llava": Multimodal("LlavaForConditionalGeneration", "llama", _LLAVA),
    "llava_next": Multimodal("LlavaNextForConditionalGeneration", "llama", _LLAVA),
    "llava_onevision": Multimodal("LlavaOnevisionForConditionalGeneration", "qwen2", _LLAVA),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2", _LLAVA, ties=True),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", _IDEFICS),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", _IDEFICS),
    "qwen2_vl": Multimodal("Qwen2VLForConditionalGeneration", "qwen2_vl_text", _QWEN, is_flat=True),
    "qwen2_5_vl": Multimodal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", _QWEN, is_flat=True),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text", _QWEN),
    "qwen3_vl_moe": Multimodal("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", _QWEN),
    "qwen3_5": Multimodal("Qwen3_5ForConditionalGeneration", "qwen3_5_text", _QWEN),
    "qwen3_5_moe": Multimodal("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", _QWEN),
}


@dataclass(frozen=True, slots=True)
class SameDecoder:
    """A type of text parts that have the decoder of a native family, once all tokens are of text.

    Attributes:
        family: model_type of the family.
        defaults: values of fields that a file leaves out, where they are not the family's.
        fixed: fields of the family that this type does not have, with the values that it acts by.
    """

    family: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)


_QWEN2_VL = SameDecoder(
    "qwen2",
    {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80},
)
# Positions of text are the same in all sections of a rotation, so that it is the usual one.
SAME_DECODERS: Mapping[str, SameDecoder] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": SameDecoder(
        "qwen3", {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}, {"use_sliding_window": False}
    ),
    "qwen3_vl_moe_text": SameDecoder(
        "qwen3_moe",
        {
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        {"use_sliding_window": False, "norm_topk_prob": True},
    ),
}

# What text parts of other types need.
_NEEDS: Mapping[str, str] = {
    "gemma3n_text": "embeddings for each layer",
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Sizes that a `text_config` may leave out, as published ones do; by type, in the order of _SIZES. 0 if it has none.
_DEFAULT_SIZES: Mapping[str, tuple[int, ...]] = {
    "gemma3_text": (262_208, 2304, 9216, 26, 8),
    "gemma4_text": (262_144, 2304, 9216, 30, 8),
    "gemma4_unified_text": (262_144, 2304, 9216, 30, 8),
    "llama4_text": (202_048, 5120, 8192, 48, 40),
    "llama": (32_000, 4096, 11_008, 32, 32),
    "mistral": (32_000, 4096, 14_336, 32, 32),
    "qwen2": (151_936, 4096, 22_016, 32, 32),
    "qwen3": (151_936, 4096, 22_016, 32, 32),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16),
    "qwen3_5_moe_text": (248_320, 2048, 0, 40, 16),
}


def default_sizes(text: str) -> dict[str, int]:
    """Return the sizes that a `text_config` of this type may leave out, as in transformers' configuration class."""
    return {name: size for name, size in zip(_SIZES, _DEFAULT_SIZES.get(text, ()), strict=False) if size}


def multimodal(config: Mapping[str, Any]) -> Multimodal | None:
    """Return the type of a multimodal checkpoint whose text part is served; None for any other model.

    Raises:
        ModelError: if it is a multimodal checkpoint whose text part is not served.
    """
    fields = Fields(config)
    kind, row = fields.value("model_type"), MULTIMODAL.get(str(fields.value("model_type")))
    parts = [name for name in ("vision_config", "audio_config", "text_config") if fields.value(name) is not None]
    if row is None and not parts:
        return None
    text = str(fields.mapping("text_config").get("model_type", row.text if row else None))
    classes = fields.texts("architectures")
    if row is None and "text_config" not in parts:
        raise ModelError(f"model_type is {shown(kind)} with {parts[0]}: only text models are supported")
    is_native = text in FAMILIES or text in SAME_DECODERS
    if row is None or not is_native:
        needs = f": it needs {_NEEDS[text]}" if text in _NEEDS else ""
        known = "of this type" if row is None and is_native else f"with a text part of type {shown(text)}"
        raise ModelError(f"model_type is {shown(kind)}: multimodal models {known} are not supported{needs}")
    if classes and row.model_class not in classes:
        raise ModelError(f"architectures is {shown(classes)}: only {row.model_class} is supported")
    return row


def text_config(config: Mapping[str, Any], row: Multimodal) -> dict[str, Any]:
    """Return the config.json of the text part alone.

    As in transformers, the end tokens, the tied head and the quantisation are those of the whole model.
    """
    nested = Fields(config).mapping("text_config")
    if row.is_flat and config.get("text_config") is None:
        nested = {name: value for name, value in config.items() if name not in ("model_type", "vision_config")}
    kind = str(nested.get("model_type", row.text))
    sizes: Mapping[str, Any] = default_sizes(kind)
    if (same := SAME_DECODERS.get(kind)) is not None:
        sizes, kind = {**same.defaults, **sizes}, same.family
        nested = {**nested, **_without_sections(nested), **same.fixed}
    whole = {name: config[name] for name in ("eos_token_id", "quantization_config") if config.get(name) is not None}
    ties = config.get("tie_word_embeddings", row.ties) or nested.get("tie_word_embeddings", False)
    text = {"model_type": kind, "architectures": [FAMILIES[kind].model_class], "tie_word_embeddings": ties}
    return {**sizes, **nested, **whole, **text}


def _without_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters without the type that says only that a rotation has sections."""
    found = {name: text[name] for name in ("rope_scaling", "rope_parameters") if isinstance(text.get(name), Mapping)}
    return {
        name: {**parameters, "rope_type": "default"}
        for name, parameters in found.items()
        if parameters.get("rope_type", parameters.get("type")) == "mrope"
    }
