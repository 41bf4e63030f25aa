"""Size of the KV cache: arithmetic over the settings, the model's shape and the available memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from fastgen.core.blocks.state_pool import StatePool
from fastgen.core.blocks.window_pool import most_held
from fastgen.settings import ConfigError, EngineConfig

# Rows that the sampler processes at once: enough to vectorise, few enough for small float64 copies of their logits.
ROWS_SAMPLED_AT_ONCE = 32

# Default cap of the cache without a container limit, because other programs share the machine's memory.
_CAP_WITHOUT_LIMIT = 4 << 30
# Growth under load of the allocator, the interpreter and the HTTP process in the same container. Measured with
# SmolLM2-135M: the engine process grew by about 200 MB over its first prompts, working memory included.
_GROWTH = 192 << 20
_MORE_MEMORY = {"cpu": "give the container or machine more memory", "cuda": "use a GPU with more memory"}
_TAKEN = {"cpu": "the weights, the memory of a step and --swap-space", "cuda": "the weights and the memory of a step"}
_FLOAT32 = 4
# Length of sequences for which layers with and without a sliding window share scarce memory.
_EXPECTED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of one sequence's recurrent states in float32, in each of `num_layers` layers.

    Attributes:
        inputs: [tokens, width], the last inputs of the layer's convolution.
        matrices: [heads, key_dim, value_dim], what the layer remembers of all tokens (Yang et al., 2024).
    """

    num_layers: int
    inputs: tuple[int, int]
    matrices: tuple[int, int, int]

    def of_ranks(self, size: int) -> StateShape:
        """Return the shape of the states of all ranks, given that of one."""
        (tokens, width), (heads, *dims) = self.inputs, self.matrices
        return StateShape(self.num_layers, (tokens, size * width), (size * heads, dims[0], dims[1]))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the states of all layers."""
        return _FLOAT32 * self.num_layers * (math.prod(self.inputs) + math.prod(self.matrices))


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's keys and values: `num_kv_heads` heads in each layer with attention.

    Attributes:
        states: shape of the recurrent states of layers without keys and values; None if there are none.
        others: shape of the keys and values of layers with other heads; None if there are none.
        windowed: shape of those of layers with a sliding window, in blocks of their own; None if all layers keep all
            tokens.
        window: tokens that these layers keep; None for all.
        key_dim, value_dim: head dimensions of keys and values.
        element_bytes: bytes per element.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int = _FLOAT32
    states: StateShape | None = None
    others: KVShape | None = None
    windowed: KVShape | None = None
    window: int | None = None

    def of_ranks(self, size: int) -> KVShape:
        """Return the shape of the keys and values of all ranks, and of their states, given those of one."""
        others, windowed = (None if part is None else part.of_ranks(size) for part in (self.others, self.windowed))
        states = None if self.states is None else self.states.of_ranks(size)
        return replace(self, num_kv_heads=size * self.num_kv_heads, states=states, others=others, windowed=windowed)

    @property
    def by_heads(self) -> tuple[KVShape, ...]:
        """The shape of the layers that have the model's heads, and of the others."""
        return (self,) if self.others is None else (self, self.others)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer, the one that has most."""
        return max(part.num_kv_heads * (part.key_dim + part.value_dim) * part.element_bytes for part in self.by_heads)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block: keys and values of all layers but those of `windowed`."""
        per_head = (self.key_dim + self.value_dim) * self.element_bytes
        others = 0 if self.others is None else self.others.block_bytes(block_size)
        return self.num_layers * self.num_kv_heads * per_head * block_size + others


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
class CacheMemory:
    """Bytes for the KV cache: the default, and the upper limit of --kv-cache-memory."""

    default: int
    limit: int


def host_cache_memory(config: EngineConfig, available_bytes: int, *, limited: bool) -> CacheMemory:
    """Return the memory for a cache on the CPU: by default `memory_percent` of the available memory.

    Without a container limit the default is at most 4 GiB.

    Args:
        config: the settings.
        available_bytes: memory that is free after loading the weights, minus `working_memory_bytes` and the host
            buffer.
        limited: whether a container limit bounds `available_bytes`.
    """
    share = available_bytes * config.memory_percent // 100
    return CacheMemory(share if limited else min(share, _CAP_WITHOUT_LIMIT), available_bytes)


def gpu_cache_memory(config: EngineConfig, *, total_bytes: int, free_bytes: int, step_bytes: int) -> CacheMemory:
    """Return the memory for a cache on a GPU.

    `memory_percent` of the GPU's memory covers all that is in use: weights, cache, steps and other programs.

    Args:
        config: the settings.
        total_bytes: memory of the GPU.
        free_bytes: memory that is free after loading the weights.
        step_bytes: peak memory of a step, with CUDA graphs.
    """
    limit = max(0, free_bytes - step_bytes)
    reserved = total_bytes * (100 - config.memory_percent) // 100
    return CacheMemory(max(0, limit - reserved), limit)


def working_memory_bytes(config: EngineConfig, shape: ModelShape, kv: KVShape) -> int:
    """Return the bytes to keep free, besides weights and KV cache, for the largest step.

    It has the whole token budget, every sequence samples in it, and one chunk has the longest context.
    """
    heads = shape.num_heads * max(part.key_dim for part in kv.by_heads)
    kv_heads = max(part.num_kv_heads * part.key_dim for part in kv.by_heads)
    row = 4 * shape.hidden_size + 3 * heads + 2 * kv_heads + 3 * shape.intermediate_size
    # Inputs and outputs of the convolution, and queries, keys, values and results in float32.
    row += 0 if kv.states is None else 6 * kv.states.inputs[1]
    activations = _FLOAT32 * row * config.most_tokens
    # Sampling needs three float64 copies of the rows that it processes at once.
    logits = shape.vocab_size * (
        _FLOAT32 * config.sequence_limit + 3 * 8 * min(ROWS_SAMPLED_AT_ONCE, config.sequence_limit)
    )
    longest = min(config.max_model_length or shape.default_length, shape.max_position_embeddings)
    context = _FLOAT32 * 2 * (kv_heads * longest + heads * config.most_tokens)
    return activations + logits + 2 * context + _GROWTH


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The least bytes with which a model can serve, by what they are for.

    Attributes:
        cache: the KV cache, and the host buffer for swapped sequences.
    """

    weights: int
    step: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.step + self.cache


def least_memory(
    config: EngineConfig, kv: KVShape, weight_bytes: int, *, step_bytes: int, tokens: int = 1
) -> MemoryNeed:
    """Return the least memory with which a model can serve `tokens` tokens, or `max_model_length` if that is more.

    Args:
        weight_bytes: of the weights.
        step_bytes: of what a step takes.
        tokens: that the KV cache must hold.
    """
    blocks = -(-max(tokens, config.max_model_length or 1) // config.block_size)
    cache = blocks * kv.block_bytes(config.block_size)
    if kv.windowed is not None and kv.windowed.window is not None:
        held = min(blocks, most_held(kv.windowed.window, config.block_size))
        cache += held * kv.windowed.block_bytes(config.block_size)
    if config.device == "cpu":  # of a GPU, the rest stays free before anything is taken
        cache = cache * 100 // config.memory_percent
    host = config.swap_space if config.device == "cpu" else 0
    return MemoryNeed(weight_bytes, step_bytes, (config.kv_cache_memory or cache) + host)


def plan_state_slots(config: EngineConfig, kv: KVShape, memory: CacheMemory) -> int:
    """Return the number of slots for recurrent states: two for each sequence, in at most half of the cache's memory.

    One is for a running sequence, the others for snapshots; see `fastgen.core.blocks.state_pool`.

    Raises:
        ConfigError: if half of the memory has no room for the least number of slots.
    """
    if kv.states is None:
        return 0
    slot_bytes, least = kv.states.slot_bytes, StatePool.LEAST_SLOTS
    size = memory.default if config.kv_cache_memory is None else min(config.kv_cache_memory, memory.limit)
    slots = min(max(least, 2 * config.sequence_limit), size // 2 // slot_bytes)
    if slots < least:
        asked = config.kv_cache_memory is not None
        what = f"--kv-cache-memory {_mib(size)}" if asked else f"--memory-percent {config.memory_percent}"
        raise ConfigError(
            f"{what}: the model has recurrent states of {slot_bytes} bytes for each sequence, and needs room for "
            f"{least} in half of the cache's {size} bytes: raise it, or {_MORE_MEMORY[config.device]}"
        )
    return slots


def plan_kv_blocks(
    config: EngineConfig,
    shape: ModelShape,
    kv: KVShape,
    memory: CacheMemory,
    num_state_slots: int = 0,
    num_window_blocks: int = 0,
) -> int:
    """Return the number of KV cache blocks: `kv_cache_memory` if set, otherwise the default of `memory`.

    Slots of recurrent states and blocks of layers with a sliding window take their part of it first.

    There are no more than all sequences at full length can use, except with `kv_cache_memory` and prefix caching.

    Raises:
        ConfigError: if `kv_cache_memory` exceeds the limit of `memory`, or not one block fits.
    """
    block_bytes = kv.block_bytes(config.block_size)
    taken = 0 if kv.states is None else num_state_slots * kv.states.slot_bytes
    taken += 0 if kv.windowed is None else num_window_blocks * kv.windowed.block_bytes(config.block_size)
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > memory.limit:
            raise ConfigError(
                f"--kv-cache-memory {_mib(config.kv_cache_memory)}: only {_mib_left(memory.limit)} of memory are left "
                f"after {_TAKEN[config.device]}: lower it or {_MORE_MEMORY[config.device]}"
            )
        blocks = (config.kv_cache_memory - taken) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--kv-cache-memory {config.kv_cache_memory}: one block of {config.block_size} tokens takes "
                f"{block_bytes} bytes: raise it to {block_bytes + taken} or lower --block-size"
            )
    else:
        blocks = (memory.default - taken) // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--memory-percent {config.memory_percent}: not one KV cache block of {block_bytes} bytes fits in the "
                f"{memory.default} bytes that it leaves for the cache: raise it, lower --block-size or --token-budget, "
                f"or {_MORE_MEMORY[config.device]}"
            )
    most_used = config.sequence_limit * -(-shape.max_position_embeddings // config.block_size)
    # Blocks beyond all sequences at full length serve only the prefix cache: allocate them only if requested.
    return blocks if config.kv_cache_memory is not None and config.prefix_caching else min(blocks, most_used)


def plan_window_blocks(config: EngineConfig, shape: ModelShape, kv: KVShape, memory: CacheMemory) -> int:
    """Return the number of blocks for the layers with a sliding window; 0 if they should have none of their own.

    They are as many as `sequence_limit` sequences hold at a time with a step's tokens, so that the other layers' blocks
    alone limit what fits. If that would take more than a quarter of the memory, they are that quarter, or more where
    sequences of `_EXPECTED_TOKENS` tokens, or of half the longest request if that is less, need it.

    The layers should have none of their own if more tokens would fit without them.

    Args:
        config: the settings.
        shape: the model's.
        kv: with `windowed`.
        memory: for the cache.
    """
    assert kv.windowed is not None
    assert kv.windowed.window is not None
    size = memory.default if config.kv_cache_memory is None else min(config.kv_cache_memory, memory.limit)
    whole, windowed = kv.block_bytes(config.block_size), kv.windowed.block_bytes(config.block_size)
    held = most_held(kv.windowed.window, config.block_size)
    longest = min(config.max_model_length or shape.default_length, shape.max_position_embeddings)
    expected = -(-min(_EXPECTED_TOKENS, longest // 2) // config.block_size)
    balanced = size * held // (expected * whole + held * windowed) if expected else 0
    most = config.sequence_limit * held + -(-config.most_tokens // config.block_size)
    blocks = min(most, max(size // 4 // windowed, balanced))
    gains = (size - blocks * windowed) // whole > size // (whole + windowed)
    return blocks if blocks > held and gains else 0


def plan_host_blocks(config: EngineConfig, kv: KVShape, available_bytes: int) -> int:
    """Return the number of blocks in the host buffer for swapped sequences: `swap_space`.

    Raises:
        ConfigError: if `swap_space` exceeds the free memory, or is smaller than one block.
    """
    if not config.swap_space:
        return 0
    if config.swap_space > available_bytes:
        raise ConfigError(
            f"--swap-space {_mib(config.swap_space)}: only {_mib_left(available_bytes)} of host memory are left: lower "
            "it or give the container or machine more memory"
        )
    block_bytes = kv.block_bytes(config.block_size)
    if config.swap_space < block_bytes:
        raise ConfigError(
            f"--swap-space {config.swap_space}: one block of {config.block_size} tokens takes {block_bytes} bytes: "
            f"raise it to {block_bytes} or more"
        )
    return config.swap_space // block_bytes


def resolve_max_model_length(config: EngineConfig, shape: ModelShape, kv: KVShape, num_blocks: int) -> int:
    """Return the longest prompt plus generation: `max_model_length`, or what model and cache allow.

    Raises:
        ConfigError: if `max_model_length` exceeds the model's positions or the cache.
    """
    capacity, longest = num_blocks * config.block_size, shape.max_position_embeddings
    requested = config.max_model_length
    if requested is None:
        return min(shape.default_length, capacity)
    if requested > longest:
        raise ConfigError(f"--max-model-length {requested}: the model has {longest} positions: lower it to {longest}")
    if requested > capacity:
        needed = -(-requested // config.block_size)
        raise ConfigError(
            f"--max-model-length {requested} needs {needed} blocks of {config.block_size} tokens, the KV cache has "
            f"{num_blocks}: lower it to {capacity} or raise --kv-cache-memory to "
            f"{_mib((1 if kv.states is None else 2) * needed * _all_layers(kv, config.block_size))}"
        )
    return requested


def _all_layers(kv: KVShape, block_size: int) -> int:
    """Return the bytes of a block of all layers, of which no cache of the same tokens needs more."""
    return kv.block_bytes(block_size) + (0 if kv.windowed is None else kv.windowed.block_bytes(block_size))


def _mib(size: int) -> str:
    """Format bytes in MiB, rounded up so that the text is a sufficient setting."""
    return f"{-(-size // (1 << 20))}MiB"


def _mib_left(size: int) -> str:
    """Format free bytes in MiB, rounded down so that the text is a setting that fits."""
    return f"{size >> 20}MiB"
