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
_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "decoder_sparse_step": 1,
}
_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0],
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
        name = "Gemma3TextConfig" if self.family == "Gemma3" else f"{self.family}Config"
        return getattr(transformers, name)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.family}ForCausalLM")

    def build(self) -> PreTrainedModel:
        """Return transformers' model, the same at every call, with eager attention: only that supports score caps."""
        torch.manual_seed(7)
        config = self.config_class(**{**SIZES, **self.settings})
        config._attn_implementation = "eager"
        model: PreTrainedModel = self.model_class(config).eval()
        for name, parameter in model.named_parameters():
            # Initialised to 0 or 1, a missing or confused norm would go unnoticed.
            if name.endswith(("norm.weight", "layernorm.weight", ".bias")):
                torch.nn.init.normal_(parameter, 0.7 if "Gemma" not in self.family else 0.0, 0.3)
        return model


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
    "mixtral": Tiny("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}),
    "qwen2-moe": Tiny(
        "Qwen2Moe", _MIXTURE | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "qwen2-moe-sparse": Tiny(
        "Qwen2Moe", _MIXTURE | {"shared_expert_intermediate_size": 56, "decoder_sparse_step": 2, "qkv_bias": False}
    ),
    "qwen3-moe": Tiny("Qwen3Moe", _MIXTURE | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-window": Tiny("Qwen3Moe", _MIXTURE | {"use_sliding_window": True, "sliding_window": 8}),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens without special ones."""
    return random.Random(1000 * seed + length).choices(range(3, VOCABULARY), k=length)


@cache
def saved(name: str, root: Path) -> Path:
    """Save a model under `root` and return its directory."""
    folder = root / name
    TINY[name].build().save_pretrained(folder)
    return folder
