"""Every family in GGUF format against transformers with the same weights."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from fastgen.model.config.gguf_families import FAMILIES
from support import tiny_models
from support.driving import load, run_in_chunks
from support.gguf_writing import ARCHITECTURES, write_gguf

SIZES: dict[str, Any] = tiny_models.SIZES | {"intermediate_size": 96}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GEMMA2 = {
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
    "attention_bias": True,
}
GRANITE_4 = GRANITE | {"layer_types": ["attention"] * 3}


def scaled(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


LLAMA3 = scaled(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
LONG = scaled(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
    long_factor=[1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0],
    original_max_position_embeddings=128,
)
# transformers' class prefix of the family, and its settings in addition to the common sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3 rotary": ("Llama", LLAMA3),
    "llama linear rotary": ("Llama", scaled(rope_type="linear", factor=4.0) | {"max_position_embeddings": 32}),
    "mistral with a window": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "Qwen2",
        scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32) | {"max_position_embeddings": 32},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen2moe": ("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", MIXTURE | {"head_dim": 24, "norm_topk_prob": True}),
    "phi3 with a window": ("Phi3", {"sliding_window": 20}),
    "phi3 long, in part": ("Phi3", LONG | {"original_max_position_embeddings": 128}),
    "phi3 partial rotary": ("Phi3", scaled(rope_type="default", partial_rotary_factor=0.75)),
    "granite": ("Granite", GRANITE),
    "granite with experts": ("GraniteMoe", GRANITE | {"num_local_experts": 4}),
    "granite 4": (
        "GraniteMoeHybrid",
        GRANITE_4 | {"num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "granite 4 with experts, without positions": (
        "GraniteMoeHybrid",
        GRANITE_4 | {"num_local_experts": 4, "shared_intermediate_size": 64},
    ),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}
TOKENS = random.Random(1).choices(range(3, 157), k=83)


@cache
def build(name: str) -> PreTrainedModel:
    family, settings = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    made = config(**{**SIZES, **settings})
    made._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for part, parameter in model.named_parameters():
        if part.endswith(("norm.weight", "layernorm.weight", ".bias")):  # initialised to constants
            torch.nn.init.normal_(parameter, 0.0 if family.startswith("Gemma") else 0.7, 0.3)
    return model


def their_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
    return logits


def test_every_family_of_gguf_files_is_tested() -> None:
    written = {gguf.MODEL_ARCH_NAMES[ARCHITECTURES[build(name).config.model_type]] for name in MODELS}
    assert written == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    model = build(name)
    runner = load(write_gguf(model, tmp_path / "tiny.gguf"), kv_cache_memory=4 << 20, block_size=16)
    group = runner.window_group
    blocks = random.Random(2).sample(range(runner.num_blocks if group is None else group.num_blocks), 6)
    for sizes in ([83], [7, 1, 33]):
        logits = run_in_chunks(runner, TOKENS, blocks, sizes)
        torch.testing.assert_close(logits, their_logits(model), atol=1e-4, rtol=0)
