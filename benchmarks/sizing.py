"""Tables of docs/sizing.md: the memory of models, and what fits on a GPU or into a container.

`python -m benchmarks.sizing` prints them. The engine's own functions compute everything from the models' shapes;
nothing is loaded or measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.kv_cache.sizing import (
    gpu_cache_memory,
    least_memory,
    plan_kv_blocks,
    resolve_max_model_length,
    working_memory_bytes,
)
from fastgen.model.cache_shape import cache_shape
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.settings import ConfigError, EngineConfig

GIB = 1 << 30
# GiB of a GPU as CUDA reports them, rounded down: L4 and A10; A100-40GB; L40S; A100-80GB and H100; H200.
GPUS = (22, 39, 44, 79, 139)
# Both processes of an engine beyond weights, cache and working memory: 477 MiB, measured (docs/benchmarks/engine.md).
_PROCESSES = GIB // 2
_CPU_TOKENS = 32768
# Settings: the token budget of the table of GPUs, and the longest request of both.
_GPU_BUDGET, _LENGTH = 2048, 8192
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "vocab_size": 151936, "max_position_embeddings": 40960}


def _config(
    base: Mapping[str, Any], layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """Return the fields of a config.json that sizes depend on."""
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "max_position_embeddings": 131072}
_SMOLLM2 = {**_LLAMA, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_QWEN2 = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
_MISTRAL = {
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
_GEMMA2 = {
    "model_type": "gemma2",
    "rms_norm_eps": 1e-6,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _config(_SMOLLM2, 30, 576, 1536, 9, 3),
    "Qwen3-0.6B": _config(_QWEN3, 28, 1024, 3072, 16, 8, head_dim=128, tie_word_embeddings=True),
    "SmolLM2-1.7B": _config(_SMOLLM2, 24, 2048, 8192, 32, 32),
    "Llama-3.2-3B": _config(_LLAMA3, 28, 3072, 8192, 24, 8, tie_word_embeddings=True),
    "Qwen3-4B": _config(_QWEN3, 36, 2560, 9728, 32, 8, head_dim=128, tie_word_embeddings=True),
    "Mistral-7B-v0.3": _config(_MISTRAL, 32, 4096, 14336, 32, 8),
    "Qwen2.5-7B": _config(_QWEN2, 28, 3584, 18944, 28, 4),
    "Llama-3.1-8B": _config(_LLAMA3, 32, 4096, 14336, 32, 8),
    "Gemma-2-9B": _config(_GEMMA2, 42, 3584, 14336, 16, 8),
    "Qwen3-14B": _config(_QWEN3, 40, 5120, 17408, 40, 8, head_dim=128),
    "Qwen3-30B-A3B": _config(_QWEN3_MOE, 48, 2048, 6144, 32, 4, head_dim=128, moe_intermediate_size=768),
    "Qwen3-32B": _config(_QWEN3, 64, 5120, 25600, 64, 8, head_dim=128),
    "Llama-3.1-70B": _config(_LLAMA3, 80, 8192, 28672, 64, 8),
}
MODELS: dict[str, ModelArchitecture] = {
    name: architecture_from_huggingface(config, None) for name, config in CONFIGS.items()
}


def gpu_tokens(model: ModelArchitecture, gpu_gib: int) -> int:
    """Return the tokens in the KV cache of a GPU in bfloat16; 0 if the model does not fit.

    The engine measures the peak memory of a step on a GPU. This is the computed one of a CPU in float32, which is more.
    """
    config = EngineConfig(model="", device="cuda", token_budget=_GPU_BUDGET, max_model_length=_LENGTH)
    kv = cache_shape(model, 2)
    free = max(0, gpu_gib * GIB - 2 * model.num_parameters)
    step = working_memory_bytes(config, model, kv)
    memory = gpu_cache_memory(config, total_bytes=gpu_gib * GIB, free_bytes=free, step_bytes=step)
    try:
        blocks = plan_kv_blocks(config, model, kv, memory)
        resolve_max_model_length(config, model, kv, blocks)
    except ConfigError:
        return 0
    return blocks * config.block_size


def container_bytes(model: ModelArchitecture, dtype: str) -> int:
    """Return the memory limit with which a replica on a CPU has `_CPU_TOKENS` tokens of KV cache."""
    config = EngineConfig(model="", device="cpu", dtype=dtype, max_model_length=_LENGTH)
    kv = cache_shape(model, _ELEMENT_BYTES[dtype])
    step = working_memory_bytes(config, model, kv)
    need = least_memory(config, kv, _ELEMENT_BYTES[dtype] * model.num_parameters, step_bytes=step, tokens=_CPU_TOKENS)
    return need.total + _PROCESSES


def gpu_table() -> str:
    """Return a Markdown table: weights in bfloat16, and the tokens in the KV cache of each GPU."""
    lines = [
        f"| model | weights, GiB | {' | '.join(f'{gib} GiB' for gib in GPUS)} |",
        "|---|---:|" + "---:|" * len(GPUS),
    ]
    for name, model in MODELS.items():
        tokens = " | ".join(_thousands(gpu_tokens(model, gib)) for gib in GPUS)
        lines.append(f"| {name} | {2 * model.num_parameters / GIB:.1f} | {tokens} |")
    return "\n".join(lines)


def cpu_table() -> str:
    """Return a Markdown table: the KV cache of a token in bfloat16, and the memory on a CPU in both formats."""
    lines = [
        "| model | KV cache, KiB per token | weights in bfloat16 | in float32 | container in bfloat16 | in float32 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, model in MODELS.items():
        kib = cache_shape(model, 2).block_bytes(1) / 1024
        weights = (size * model.num_parameters / GIB for size in (2, 4))
        containers = (container_bytes(model, dtype) / GIB for dtype in ("bfloat16", "float32"))
        lines.append(f"| {name} | {kib:.0f} | " + " | ".join(f"{gib:.1f}" for gib in (*weights, *containers)) + " |")
    return "\n".join(lines)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1000:,}" if tokens else "–"


if __name__ == "__main__":
    print(f"{gpu_table()}\n\n{cpu_table()}")
