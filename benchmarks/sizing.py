"""Tables of docs/sizing.md: the memory of models, and what fits on a GPU or into a container.

`python -m benchmarks.sizing` prints them. The engine's own functions compute everything from the models' shapes;
nothing is loaded or measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fastgen.kv_cache.sizing import (
    CacheMemory,
    gpu_cache_memory,
    least_memory,
    plan_kv_blocks,
    resolve_max_model_length,
    working_memory_bytes,
)
from fastgen.model.cache_shape import cache_shape
from fastgen.model.config.architecture import EMBEDDING, HEAD, ModelArchitecture
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.partition import Partition, check_divisible
from fastgen.settings import ConfigError, EngineConfig

GIB = 1 << 30
# GiB of a GPU as CUDA reports them, rounded down: L4 and A10; A100-40GB; L40S; A100-80GB and H100; H200.
GPUS = (22, 39, 44, 79, 139)
# Of pods with several GPUs, and how many.
POD_GPUS, COUNTS = (22, 79), (1, 2, 4, 8)
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

# Models of the table of several GPUs: those that may not fit on one.
LARGE_MODELS = {name: model for name, model in MODELS.items() if model.num_parameters > 7 << 30}
LARGE_MODELS["Qwen3-235B-A22B"] = architecture_from_huggingface(
    _config(_QWEN3_MOE, 94, 4096, 12288, 64, 4, head_dim=128, moe_intermediate_size=1536), None
)


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


def rank_parameters(model: ModelArchitecture, size: int) -> int:
    """Return the number of parameters of the last of `size` ranks, which has the most."""
    own = Partition(size - 1, size)
    foreign = {number for layer in model.layers if layer.experts for number in range(layer.experts.count)} - {
        number for layer in model.layers if layer.experts for number in own.share(layer.experts.count)
    }
    count = 0
    for name, shape in own.architecture(model).tensor_shapes().items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is None or int(expert[1]) not in foreign:
            rows = len(own.share(model.vocab_size)) if name in (EMBEDDING, HEAD) else shape[0]
            count += math.prod((rows, *shape[1:]))
    return count


def gpu_context(model: ModelArchitecture, gpu_gib: int, size: int) -> int | None:
    """Return the tokens in the KV cache of a model that is divided among `size` GPUs.

    Each has its part of the weights and of the cache, and computes steps of the whole width. 0 if the model does not
    fit, and None if it cannot be divided among so many.
    """
    if size == 1:
        return gpu_tokens(model, gpu_gib)
    try:
        check_divisible(model, size)
    except ConfigError:
        return None
    own = Partition(size - 1, size).architecture(model)
    kv = cache_shape(own, 2)
    config = EngineConfig(
        model="", device="cuda", token_budget=_GPU_BUDGET, max_model_length=_LENGTH, tensor_parallel=size
    )
    free = max(0, gpu_gib * GIB - 2 * rank_parameters(model, size))
    step = working_memory_bytes(config, own, kv)
    each = gpu_cache_memory(config, total_bytes=gpu_gib * GIB, free_bytes=free, step_bytes=step)
    memory = CacheMemory(each.default * size, each.limit * size)
    try:
        blocks = plan_kv_blocks(config, model, kv.of_ranks(size), memory)
        resolve_max_model_length(config, model, kv.of_ranks(size), blocks)
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


def gpus_table() -> str:
    """Return a Markdown table: the tokens in the KV cache of models on 1, 2, 4 and 8 GPUs of a pod."""
    columns = [(gib, size) for gib in POD_GPUS for size in COUNTS]
    lines = [
        f"| model | {' | '.join(f'{size} × {gib} GiB' for gib, size in columns)} |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, model in LARGE_MODELS.items():
        found = (gpu_context(model, gib, size) for gib, size in columns)
        lines.append(f"| {name} | {' | '.join('×' if each is None else _thousands(each) for each in found)} |")
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
    print(f"{gpu_table()}\n\n{gpus_table()}\n\n{cpu_table()}")
