"""How large the KV cache is: pure arithmetic over the configuration, the model's shape and the memory there is."""

from __future__ import annotations

from fastgen.config import ConfigError, EngineConfig
from fastgen.model.architecture import ModelArchitecture

# The sampler's step: enough rows for vectors to pay, few enough that float64 copies of their logits stay small.
ROWS_SAMPLED_AT_ONCE = 64

_FLOAT32 = 4
# Without a container's limit, memory belongs to others too: the cpu backend stays modest unless told otherwise.
_UNLIMITED_MACHINE_MOST = 4 << 30
# What the allocator keeps, the interpreter and the HTTP process in the same container grow by under load. Measured with
# SmolLM2-135M: the engine process grew by about 200 MB over its first prompts, the working memory below included.
_GROWTH = 192 << 20


def kv_block_bytes(architecture: ModelArchitecture, block_size: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_token = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * _FLOAT32
    return per_token * block_size


def working_memory_bytes(config: EngineConfig, architecture: ModelArchitecture) -> int:
    """Bytes to keep free beside weights and KV cache, so that the fullest pass does not run out of memory.

    A pass at the token budget, every sequence sampling, and one chunk whose context is as long as can be.
    """
    a = architecture
    heads, kv_heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    row = 4 * a.hidden_size + 3 * heads + 2 * kv_heads + 3 * a.intermediate_size
    activations = _FLOAT32 * row * config.most_tokens
    # Sampling sorts and sums in float64: three copies of the rows that it takes at once.
    logits = a.vocab_size * (
        _FLOAT32 * config.sequence_limit + 3 * 8 * min(ROWS_SAMPLED_AT_ONCE, config.sequence_limit)
    )
    longest = min(config.max_model_length or a.max_position_embeddings, a.max_position_embeddings)
    context = _FLOAT32 * 2 * (kv_heads * longest + heads * config.most_tokens)
    return activations + logits + 2 * context + _GROWTH


def plan_kv_blocks(
    config: EngineConfig, architecture: ModelArchitecture, available_bytes: int, *, limited: bool
) -> int:
    """Blocks of the KV cache.

    Args:
        config: `kv_cache_memory` where given, else `memory_percent` decide.
        architecture: the model's shape.
        available_bytes: memory that is free once the weights are loaded, less `working_memory_bytes`.
        limited: whether that is what a container's limit leaves, not the whole machine's.

    Raises:
        ConfigError: when not a single block fits.
    """
    block_bytes = kv_block_bytes(architecture, config.block_size)
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > available_bytes:
            raise ConfigError(
                f"--kv-cache-memory {_mib(config.kv_cache_memory)}: only {_mib(available_bytes)} of memory are left "
                "beside the weights: lower it or give the container more memory"
            )
        blocks = config.kv_cache_memory // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--kv-cache-memory {config.kv_cache_memory}: one block of {config.block_size} tokens takes "
                f"{block_bytes} bytes: raise it to {block_bytes} or lower --block-size"
            )
    else:
        most = available_bytes * config.memory_percent // 100
        blocks = (most if limited else min(most, _UNLIMITED_MACHINE_MOST)) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--memory-percent {config.memory_percent}: of {_mib(available_bytes)} left beside the weights not one "
                f"KV cache block of {block_bytes} bytes fits: give the container more memory"
            )
    # More than every sequence at the model's full length can never be used.
    return min(blocks, config.sequence_limit * -(-architecture.max_position_embeddings // config.block_size))


def resolve_max_model_length(config: EngineConfig, architecture: ModelArchitecture, num_blocks: int) -> int:
    """Longest prompt plus generation of one request: what is asked for, else the model's own limit or the cache's.

    Raises:
        ConfigError: when what is asked for is beyond the model's positions or the whole cache.
    """
    capacity, longest = num_blocks * config.block_size, architecture.max_position_embeddings
    asked = config.max_model_length
    if asked is None:
        return min(longest, capacity)
    if asked > longest:
        raise ConfigError(f"--max-model-length {asked}: the model has {longest} positions: lower it to {longest}")
    if asked > capacity:
        needed = -(-asked // config.block_size)
        raise ConfigError(
            f"--max-model-length {asked} needs {needed} blocks of {config.block_size} tokens, the KV cache has "
            f"{num_blocks}: lower it to {capacity} or raise --kv-cache-memory to "
            f"{_mib(needed * kv_block_bytes(architecture, config.block_size))}"
        )
    return asked


def _mib(size: int) -> str:
    """Rounded up, so that it can be given back as a setting."""
    return f"{-(-size // (1 << 20))}MiB"
