"""How large the KV cache is: pure arithmetic over the configuration, the model's shape and the memory there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fastgen.config import ConfigError, EngineConfig

# The sampler's step: enough rows for vectors to pay, few enough that float64 copies of their logits stay small.
ROWS_SAMPLED_AT_ONCE = 32

# Without a container's limit, memory belongs to others too: the cpu backend stays modest unless told otherwise.
_UNLIMITED_MACHINE_MOST = 4 << 30
# What the allocator keeps, the interpreter and the HTTP process in the same container grow by under load. Measured with
# SmolLM2-135M: the engine process grew by about 200 MB over its first prompts, the working memory below included.
_GROWTH = 192 << 20
_MORE_MEMORY = {"cpu": "give the container more memory", "cuda": "use a GPU with more memory"}
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the cache: keys and values of `num_kv_heads` heads in each layer.

    Attributes:
        key_dim, value_dim: numbers of a head's key and value.
        element_bytes: bytes of a number.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int = _FLOAT32

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        per_head = (self.key_dim + self.value_dim) * self.element_bytes
        return self.num_layers * self.num_kv_heads * per_head * block_size


class ModelShape(Protocol):
    """The dimensions of a model that memory planning and the engine depend on."""

    @property
    def name(self) -> str:
        """Model family, for example llama."""

    @property
    def vocab_size(self) -> int:
        """Logits per row."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width of the widest feed-forward layer."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_parameters(self) -> int:
        """Number of weights."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the model supports."""

    @property
    def default_length(self) -> int:
        """Longest sequence served unless `max_model_length` is set."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Bytes that the KV cache takes where nothing is asked for, and the most that may be asked for."""

    default: int
    most: int


def host_room(config: EngineConfig, available_bytes: int, *, limited: bool) -> CacheRoom:
    """The room for a cache in host memory.

    Args:
        config: `memory_percent` of what is there is taken.
        available_bytes: memory that is free once the weights are loaded, less `working_memory_bytes`.
        limited: whether that is what a container's limit leaves, not the whole machine's.
    """
    share = available_bytes * config.memory_percent // 100
    return CacheRoom(share if limited else min(share, _UNLIMITED_MACHINE_MOST), available_bytes)


def device_room(config: EngineConfig, *, total_bytes: int, free_bytes: int, pass_bytes: int) -> CacheRoom:
    """The room for a cache in a GPU's own memory.

    Args:
        config: `memory_percent` of the whole memory is for everything: weights, cache and passes.
        total_bytes: the GPU's memory.
        free_bytes: what is free of it once the weights are loaded.
        pass_bytes: what the largest pass takes beside them.
    """
    most = max(0, free_bytes - pass_bytes)
    kept = total_bytes * (100 - config.memory_percent) // 100
    return CacheRoom(max(0, most - kept), most)


def working_memory_bytes(config: EngineConfig, shape: ModelShape, kv: KVShape) -> int:
    """Bytes to keep free beside weights and KV cache, so that the fullest pass does not run out of memory.

    A pass at the token budget, every sequence sampling, and one chunk whose context is as long as can be.
    """
    heads, kv_heads = shape.num_heads * kv.key_dim, kv.num_kv_heads * kv.key_dim
    row = 4 * shape.hidden_size + 3 * heads + 2 * kv_heads + 3 * shape.intermediate_size
    activations = _FLOAT32 * row * config.most_tokens
    # Sampling sorts and sums in float64: three copies of the rows that it takes at once.
    logits = shape.vocab_size * (
        _FLOAT32 * config.sequence_limit + 3 * 8 * min(ROWS_SAMPLED_AT_ONCE, config.sequence_limit)
    )
    longest = min(config.max_model_length or shape.default_length, shape.max_position_embeddings)
    context = _FLOAT32 * 2 * (kv_heads * longest + heads * config.most_tokens)
    return activations + logits + 2 * context + _GROWTH


def plan_kv_blocks(config: EngineConfig, shape: ModelShape, kv: KVShape, room: CacheRoom) -> int:
    """Blocks of the KV cache.

    Args:
        config: `kv_cache_memory` where given, else the room's default decides.
        shape: the model's, for its longest sequence.
        kv: what a token takes.
        room: the memory there is.

    Raises:
        ConfigError: when not a single block fits.
    """
    block_bytes = kv.block_bytes(config.block_size)
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > room.most:
            raise ConfigError(
                f"--kv-cache-memory {_mib(config.kv_cache_memory)}: only {_mib(room.most)} of memory are left "
                f"beside the weights: lower it or {_MORE_MEMORY[config.device]}"
            )
        blocks = config.kv_cache_memory // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--kv-cache-memory {config.kv_cache_memory}: one block of {config.block_size} tokens takes "
                f"{block_bytes} bytes: raise it to {block_bytes} or lower --block-size"
            )
    else:
        blocks = room.default // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--memory-percent {config.memory_percent}: of {_mib(room.most)} left beside the weights not one "
                f"KV cache block of {block_bytes} bytes fits: {_MORE_MEMORY[config.device]}"
            )
    most_used = config.sequence_limit * -(-shape.max_position_embeddings // config.block_size)
    # More than every sequence at the model's full length is of use to the prefix cache only: it has what it is given.
    return blocks if config.kv_cache_memory is not None and config.prefix_caching else min(blocks, most_used)


def plan_host_blocks(config: EngineConfig, kv: KVShape, available_bytes: int) -> int:
    """Blocks of the host buffer that preempted sequences are swapped to.

    Args:
        config: its `swap_space`.
        kv: what a token takes.
        available_bytes: host memory that nothing else will take.

    Raises:
        ConfigError: when that much memory is not there, or not one block fits into it.
    """
    if not config.swap_space:
        return 0
    if config.swap_space > available_bytes:
        raise ConfigError(
            f"--swap-space {_mib(config.swap_space)}: only {_mib(available_bytes)} of host memory are left: lower it "
            "or give the container more memory"
        )
    block_bytes = kv.block_bytes(config.block_size)
    if config.swap_space < block_bytes:
        raise ConfigError(
            f"--swap-space {config.swap_space}: one block of {config.block_size} tokens takes {block_bytes} bytes: "
            f"raise it to {block_bytes} or more"
        )
    return config.swap_space // block_bytes


def resolve_max_model_length(config: EngineConfig, shape: ModelShape, kv: KVShape, num_blocks: int) -> int:
    """Longest prompt plus generation of one request: what is asked for, else the model's own limit or the cache's.

    Raises:
        ConfigError: when what is asked for is beyond the model's positions or the whole cache.
    """
    capacity, longest = num_blocks * config.block_size, shape.max_position_embeddings
    asked = config.max_model_length
    if asked is None:
        return min(shape.default_length, capacity)
    if asked > longest:
        raise ConfigError(f"--max-model-length {asked}: the model has {longest} positions: lower it to {longest}")
    if asked > capacity:
        needed = -(-asked // config.block_size)
        raise ConfigError(
            f"--max-model-length {asked} needs {needed} blocks of {config.block_size} tokens, the KV cache has "
            f"{num_blocks}: lower it to {capacity} or raise --kv-cache-memory to "
            f"{_mib(needed * kv.block_bytes(config.block_size))}"
        )
    return asked


def _mib(size: int) -> str:
    """Rounded up, so that it can be given back as a setting."""
    return f"{-(-size // (1 << 20))}MiB"
