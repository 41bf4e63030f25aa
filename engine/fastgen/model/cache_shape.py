"""Shape of what a native model keeps of each token and sequence in the cache."""

from __future__ import annotations

from dataclasses import replace

from fastgen.kv_cache.sizing import KVShape, StateShape
from fastgen.model.config.architecture import Heads, ModelArchitecture


def cache_shape(architecture: ModelArchitecture, element_bytes: int) -> KVShape:
    """Return the shape of a token's keys and values, with elements of that size, and of a sequence's states."""
    return _of_layers(architecture, element_bytes, None, _state_shape(architecture))


def grouped_cache_shape(architecture: ModelArchitecture, element_bytes: int) -> KVShape | None:
    """Return the shape with layers with a sliding window apart, in blocks of their own; None if they cannot be."""
    window = architecture.longest_window
    if window is None:
        return None
    windowed = _of_layers(architecture, element_bytes, True, window=window)
    return _of_layers(architecture, element_bytes, False, windowed=windowed)


def _of_layers(
    architecture: ModelArchitecture,
    element_bytes: int,
    is_windowed: bool | None,
    states: StateShape | None = None,
    *,
    windowed: KVShape | None = None,
    window: int | None = None,
) -> KVShape:
    """Return the shape of the layers with or without a sliding window; None for all."""

    def of_heads(heads: Heads | None, others: KVShape | None) -> KVShape:
        own = heads or architecture.heads
        num_layers = architecture.num_cached_layers(heads, is_windowed=is_windowed)
        return KVShape(num_layers, own.num_kv_heads, own.head_dim, own.head_dim, element_bytes, None, others)

    other = architecture.other_heads
    shape = of_heads(None, None if other is None else of_heads(other, None))
    return replace(shape, states=states, windowed=windowed, window=window)


def _state_shape(architecture: ModelArchitecture) -> StateShape | None:
    delta = architecture.delta
    if delta is None:
        return None
    num_layers = sum(layer.delta is not None for layer in architecture.layers)
    matrices = (delta.value_heads, delta.key_dim, delta.value_dim)
    return StateShape(num_layers, (delta.kernel_size - 1, delta.mixed), matrices)
