"""Checks before weights are read whether a model can fit: otherwise the kernel kills the process while it loads.

The checks compute the least memory with which a model can serve. A model that passes may still not fit.
"""

from __future__ import annotations

from dataclasses import replace

from fastgen.kv_cache.memory import AvailableMemory, available_memory
from fastgen.kv_cache.sizing import MemoryNeed, least_memory, working_memory_bytes
from fastgen.model.cache_shape import cache_shape, grouped_cache_shape
from fastgen.model.processor import choose_cpu_dtype
from fastgen.model.source import ModelSource
from fastgen.model.weight_storage import with_storage
from fastgen.settings import ConfigError, EngineConfig

_GIB = 1 << 30
# Tensors of quantised checkpoints may stay as they are stored, in at least 4 bits.
_LEAST_BYTES = 0.5
_REMEDY = {
    "cpu": "raise its memory limit, lower --token-budget or --max-model-length, or use --quantization int8",
    "cuda": "use a GPU with more memory, or a smaller or quantised model",
}


def check_host_memory(source: ModelSource, config: EngineConfig) -> None:
    """Check a native model that the CPU kernels are to run against the limit of this process's container.

    Without a limit nothing is checked: other programs may free memory, and the machine may have swap space.

    Raises:
        ConfigError: if the model cannot fit.
    """
    if source.native is None or config.device != "cpu" or config.dtype == "float16":
        return
    memory = available_memory(drops_active=True)
    if memory.limited:
        check_need(_need_on_cpu(source, with_storage(config, source)), memory, config.device)


def check_gpu_memory(
    source: ModelSource, config: EngineConfig, *, element_bytes: int, kv_bytes: int, free_bytes: int, total_bytes: int
) -> None:
    """Check a native model against the memory of its GPUs. What a step takes is measured later.

    Args:
        free_bytes, total_bytes: of each GPU.

    Raises:
        ConfigError: if the model cannot fit.
    """
    is_quantised = source.gguf is not None or source.quantization is not None
    weights = int(source.architecture.num_parameters * (_LEAST_BYTES if is_quantised else element_bytes))
    need = least_memory(_servable(config, source), cache_shape(source.architecture, kv_bytes), weights, step_bytes=0)
    reserved = 0 if config.kv_cache_memory is not None else total_bytes * (100 - config.memory_percent) // 100
    left = config.tensor_parallel * max(0, free_bytes - reserved)
    check_need(need, AvailableMemory(left, limited=True), config.device, config.tensor_parallel)


def check_need(need: MemoryNeed, memory: AvailableMemory, device: str, num_gpus: int = 1) -> None:
    """Raise ConfigError if a model needs more memory than the device has left, or its GPUs together."""
    if need.total > memory.num_bytes:
        place = "container" if device == "cpu" else "GPU" if num_gpus == 1 else f"group of {num_gpus} GPUs"
        raise ConfigError(
            f"the model needs {_gib(need.total)} GiB of memory (weights {_gib(need.weights)}, a step "
            f"{_gib(need.step)}, KV cache and swap space {_gib(need.cache)}), the {place} has "
            f"{_gib(memory.num_bytes)} left: {_REMEDY[device]}"
        )


def _need_on_cpu(source: ModelSource, config: EngineConfig) -> MemoryNeed:
    a, element_bytes = source.architecture, 2 if choose_cpu_dtype(config).dtype == "bfloat16" else 4
    # Embeddings keep the file's format. A tied head is a second matrix, in the format of the others.
    table = 0 if a.tie_word_embeddings else a.vocab_size * a.hidden_size
    if (embeddings := a.layer_embeddings) is not None:
        table += embeddings.vocab_size * embeddings.size * a.num_layers
    each: float = {"none": element_bytes, "int8": 1, "stored": 0}[config.quantization]
    if source.quantization is not None:
        each = min(each, _LEAST_BYTES)
    kv = cache_shape(a, element_bytes)
    step = working_memory_bytes(config, a, kv)
    grouped = None if config.swap_space else grouped_cache_shape(a, element_bytes)
    weights = int((a.num_parameters - table) * each)
    return least_memory(_servable(config, source), grouped or kv, weights, step_bytes=step)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"


def _servable(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the settings with a longest request that the model has positions for: what is longer is rejected later."""
    longest = config.max_model_length
    if longest is None:
        return config
    return replace(config, max_model_length=min(longest, source.architecture.max_position_embeddings))
