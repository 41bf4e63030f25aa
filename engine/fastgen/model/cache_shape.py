"""Shape of what a native model keeps of each token and sequence in the cache."""

from __future__ import annotations

from fastgen.kv_cache.sizing import KVShape, StateShape
from fastgen.model.config.architecture import Heads, ModelArchitecture


def cache_shape(architecture: ModelArchitecture, element_bytes: int) -> KVShape:
    """Return the shape of a token's keys and values, with elements of that size, and of a sequence's states."""
    other = architecture.other_heads
    others = None if other is None else _of_layers(architecture, other, element_bytes)
    return _of_layers(architecture, None, element_bytes, others, _state_shape(architecture))


def _of_layers(
    architecture: ModelArchitecture,
    heads: Heads | None,
    element_bytes: int,
    others: KVShape | None = None,
    states: StateShape | None = None,
) -> KVShape:
    """Return the shape of the layers with these heads, None for those of the model."""
    num_layers, own = architecture.num_cached_layers(heads), heads or architecture.heads
    return KVShape(num_layers, own.num_kv_heads, own.head_dim, own.head_dim, element_bytes, states, others)


def _state_shape(architecture: ModelArchitecture) -> StateShape | None:
    delta = architecture.delta
    if delta is None:
        return None
    num_layers = sum(layer.delta is not None for layer in architecture.layers)
    matrices = (delta.value_heads, delta.key_dim, delta.value_dim)
    return StateShape(num_layers, (delta.kernel_size - 1, delta.mixed), matrices)
