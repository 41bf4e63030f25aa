"""A tiny model for every family and feature with a native implementation, built with transformers.

Windows are shorter than the prompts, sequences exceed the original length of rotary scalings, and weights are large
enough to expose a wrong computation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 157
PROMPT_LENGTH = 83

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_MIXTURE = _MOE | {"decoder_sparse_step": 1}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
}
_GRANITE_4 = _GRANITE | {"layer_types": ["full_attention"] * 3, "shared_intermediate_size": 72}
_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
}
_GLM_MIXTURE = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
_GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY + 1,
    "hidden_size_per_layer_input": 24,
}
_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0],
}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 64,
}
_GEMMA4_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}


def _scaled(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


@dataclass(frozen=True)
class Tiny:
    """A model: its family in transformers, and its configuration besides the common sizes.

    Attributes:
        max_model_length: the engine's setting, or None for its default.
        shortest: shortest prompt for which the engine and transformers agree with that setting.
    """

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    max_model_length: int | None = None
    shortest: int = 1

    @property
    def config_class(self) -> Any:
        has_text_config = self.family in ("Gemma3", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe")
        name = f"{self.family}TextConfig" if has_text_config else f"{self.family}Config"
        return getattr(transformers, name)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.family}ForCausalLM")

    def build(self) -> PreTrainedModel:
        """Return transformers' model, the same at every call, with eager attention: only that supports score caps."""
        torch.manual_seed(7)
        config = self.config()
        config._attn_implementation = "eager"
        model: PreTrainedModel = self.model_class(config).eval()
        for name, parameter in model.named_parameters():
            # Initialised to 0 or 1, a missing or confused norm would go unnoticed.
            if name.endswith(("norm.weight", "layernorm.weight", "bias", "layernorm_1.weight", "layernorm_2.weight")):
                is_offset = self.family in ("Gemma2", "Gemma3") or ("Qwen3_5" in self.family or "Next" in self.family)
                is_offset = is_offset and not name.endswith("linear_attn.norm.weight")
                torch.nn.init.normal_(parameter, 0.0 if is_offset else 0.7, 0.3)
            if name.endswith(("router.scale", "router.per_expert_scale")):
                torch.nn.init.normal_(parameter, 0.7, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, 0.0, 0.1)
            if name.endswith("layer_scalar"):
                torch.nn.init.normal_(buffer, 0.7, 0.1)
        return model

    def config(self) -> Any:
        """Return the configuration of transformers."""
        return self.config_class(**{**SIZES, **self.settings})


@dataclass(frozen=True)
class TinyMultimodal(Tiny):
    """A model for images and text: `settings` are those of its text part.

    Attributes:
        parts: configurations of its other parts; by default, one of images.
    """

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.family}ForConditionalGeneration")

    @property
    def config_class(self) -> Any:
        return getattr(transformers, f"{self.family}Config")

    def config(self) -> Any:
        if self.parts:
            return self.config_class(text_config={**SIZES, **self.settings}, **self.parts)
        vision = self.config_class().vision_config
        sizes = {name: size for name, size in _VISION.items() if hasattr(vision, name)}
        pairs = {name: [size] * 2 for name, size in sizes.items() if isinstance(getattr(vision, name), list | tuple)}
        return self.config_class(
            text_config={**SIZES, **self.settings}, vision_config={"model_type": vision.model_type, **sizes, **pairs}
        )


_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "attention_chunk_size": 32,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
_LLAMA4_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
}


_MROPE: dict[str, Any] = {
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_DEEPSTACK = {"deepstack_visual_indexes": [0]}


TINY: dict[str, Tiny] = {
    "llama": Tiny("Llama", {"num_key_value_heads": 4}),
    "llama-biases": Tiny("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": Tiny("Llama", _scaled(rope_type="linear", factor=4.0) | {"max_position_embeddings": 32}),
    "llama-dynamic": Tiny("Llama", _scaled(rope_type="dynamic", factor=4.0)),
    "llama-llama3": Tiny(
        "Llama",
        _scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    # Chunks of 32 positions are two blocks of the tests.
    "llama4": Tiny("Llama4", _LLAMA4),
    "llama4-dense-layers": Tiny(
        "Llama4",
        _LLAMA4
        | {
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
            # Equal factors, as in Llama 4 Scout.
            **_scaled(
                rope_type="llama3",
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "mistral-window": Tiny("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Tiny("Qwen2", _scaled(rope_type="yarn", factor=4.0) | {"max_position_embeddings": 32}),
    "qwen2-windows": Tiny("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": Tiny("Qwen3", {"head_dim": 24}),
    "qwen3-yarn": Tiny(
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            **_scaled(rope_type="yarn", factor=6.0, original_max_position_embeddings=40, truncate=False),
        },
    ),
    "phi3": Tiny("Phi3", {"sliding_window": 20}),
    "phi3-longrope": Tiny("Phi3", _scaled(**_LONG) | {"original_max_position_embeddings": 160}),
    "phi3-longrope-beyond": Tiny(
        "Phi3", _scaled(**_LONG) | {"original_max_position_embeddings": 32}, max_model_length=256, shortest=33
    ),
    "phi3-partial": Tiny("Phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    "gemma2": Tiny(
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3-linear": Tiny(
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 2,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": Tiny("Gemma4", _GEMMA4),
    "gemma4-shared": Tiny(
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": Tiny(
        "Gemma4",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "attention_bias": True,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4-unified": Tiny(
        "Gemma4Unified",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "num_key_value_heads": 4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": Tiny("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "smollm3-windows": Tiny(
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
    ),
    "olmo2": Tiny("Olmo2"),
    "olmo3": Tiny("Olmo3", {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmo3-yarn": Tiny(
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "olmoe": Tiny("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    "seed-oss": Tiny("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "granite": Tiny("Granite", _GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": Tiny("GraniteMoe", _GRANITE | {"num_local_experts": 4}),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybrid", _GRANITE_4 | {"num_local_experts": 0, "position_embedding_type": "rope"}
    ),
    "granitemoehybrid-experts": Tiny(
        "GraniteMoeHybrid", _GRANITE_4 | {"num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": True}
    ),
    "ernie4-5": Tiny("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "glm": Tiny("Glm", {"head_dim": 16}),
    "glm4": Tiny("Glm4", {"head_dim": 24, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}),
    "ministral": Tiny(
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": Tiny(
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}),
    "glm4-moe": Tiny("Glm4Moe", _GLM_MIXTURE | {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "glm4-moe-plain": Tiny("Glm4Moe", _GLM_MIXTURE | {"norm_topk_prob": False, "attention_bias": True}),
    "minimax-m2": Tiny(
        "MiniMaxM2", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}
    ),
    # Weights of 0.6 drive gates and up projections beyond the bounds of the activation.
    "gpt-oss": Tiny("GptOss", _GPT_OSS),
    "gpt-oss-beyond": Tiny(
        "GptOss",
        _GPT_OSS
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "initializer_range": 0.6,
            **_scaled(rope_type="default"),
        },
    ),
    "qwen2-moe": Tiny(
        "Qwen2Moe", _MIXTURE | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "qwen2-moe-sparse": Tiny(
        "Qwen2Moe", _MIXTURE | {"shared_expert_intermediate_size": 56, "decoder_sparse_step": 2, "qkv_bias": False}
    ),
    "qwen3-next": Tiny(
        "Qwen3Next",
        _MIXTURE | _LINEAR | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3-5-text": Tiny("Qwen3_5", _LINEAR | {"attention_bias": True}),
    "qwen3-5-moe-text": Tiny(
        "Qwen3_5Moe",
        _MOE
        | _LINEAR
        | {"shared_expert_intermediate_size": 56, "layer_types": ["full_attention", "linear_attention"] * 2},
    ),
    "qwen3-moe": Tiny("Qwen3Moe", _MIXTURE | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-window": Tiny("Qwen3Moe", _MIXTURE | {"use_sliding_window": True, "sliding_window": 8}),
}


_TEXT = {"initializer_range": 0.2, "head_dim": 16}
# Their text parts are those of other families.
TINY_MULTIMODAL: dict[str, Tiny] = {
    "multimodal-gemma3": TinyMultimodal("Gemma3", TINY["gemma3"].settings),
    "multimodal-gemma4": TinyMultimodal(
        "Gemma4", TINY["gemma4-shared"].settings, parts={"vision_config": _GEMMA4_VISION, "audio_config": _GEMMA4_AUDIO}
    ),
    "multimodal-gemma4-unified": TinyMultimodal(
        "Gemma4Unified", TINY["gemma4-unified"].settings, parts={"vision_config": {"mm_embed_dim": 32}}
    ),
    "multimodal-llama4": TinyMultimodal("Llama4", TINY["llama4"].settings, parts={"vision_config": _LLAMA4_VISION}),
    "multimodal-mistral3": TinyMultimodal("Mistral3", _TEXT | {"model_type": "mistral", "sliding_window": 8}),
    "multimodal-ministral3": TinyMultimodal("Mistral3", {"model_type": "ministral3"} | TINY["ministral3"].settings),
    "multimodal-llava": TinyMultimodal("Llava", _TEXT | {"model_type": "llama"}),
    "multimodal-llava-next": TinyMultimodal("LlavaNext", _TEXT | {"model_type": "mistral", "sliding_window": None}),
    "multimodal-llava-onevision": TinyMultimodal("LlavaOnevision", _TEXT | {"model_type": "qwen2"}),
    "multimodal-internvl": TinyMultimodal("InternVL", _TEXT | {"model_type": "qwen3"}),
    "multimodal-idefics3": TinyMultimodal("Idefics3", _TEXT | {"model_type": "llama"}),
    "multimodal-qwen2-vl": TinyMultimodal(
        "Qwen2VL", _MROPE, parts={"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}}
    ),
    "multimodal-qwen2-5-vl": TinyMultimodal(
        "Qwen2_5_VL",
        _MROPE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        parts={"vision_config": _QWEN_VISION},
    ),
    "multimodal-qwen3-vl": TinyMultimodal(
        "Qwen3VL", _MROPE | {"head_dim": 16}, parts={"vision_config": _QWEN_VISION | _DEEPSTACK}
    ),
    "multimodal-qwen3-vl-moe": TinyMultimodal(
        "Qwen3VLMoe", _MROPE | _MOE | {"head_dim": 16}, parts={"vision_config": _QWEN_VISION | _DEEPSTACK}
    ),
    "multimodal-qwen3-5": TinyMultimodal("Qwen3_5", _LINEAR),
    "multimodal-qwen3-5-moe": TinyMultimodal("Qwen3_5Moe", TINY["qwen3-5-moe-text"].settings),
    "multimodal-smolvlm": TinyMultimodal("SmolVLM", _TEXT | {"model_type": "llama"}),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens without special ones."""
    return random.Random(1000 * seed + length).choices(range(3, VOCABULARY), k=length)


@cache
def saved(name: str, root: Path) -> Path:
    """Save a model under `root` and return its directory."""
    folder = root / name
    (TINY | TINY_MULTIMODAL)[name].build().save_pretrained(folder)
    return folder
