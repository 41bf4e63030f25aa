"""The shape of a transformers model, from its configuration and one run that records its attention calls."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastgen.kv_cache.sizing import KVShape
from fastgen.model.transformers_backend.paged_attention import NotServedError

# Beyond the original length, rotary frequencies of these types depend on the longest position in the batch, that is on
# the other sequences of the step. Up to that length they are constant.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_DEFAULT_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class AdaptedArchitecture:
    """A `ModelShape` read from a transformers configuration; see `fastgen.kv_cache.sizing`."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    num_parameters: int

    @property
    def default_length(self) -> int:
        """Default of --max-model-length in tokens."""
        return self.max_position_embeddings


class AttentionCall(NamedTuple):
    """What one layer passed to attention: T tokens as [T, heads or kv heads, head_dim], and its window."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None


def kv_shape(calls: abc.Sequence[AttentionCall]) -> KVShape:
    """Return the cache shape for the attention calls of one step.

    Raises:
        NotServedError: if layers differ in shape, or attention is not called once per layer.
    """
    layers = [call.layer for call in calls]
    if not layers or sorted(layers) != list(range(len(layers))):
        raise NotServedError(f"attention in layers {layers}, not exactly once per layer")
    shapes = {(call.keys.shape[1], call.keys.shape[2], call.values.shape[2]) for call in calls}
    if len(shapes) > 1:
        raise NotServedError("layers with keys and values of different sizes")
    ((num_kv_heads, key_dim, value_dim),) = shapes
    return KVShape(len(layers), num_kv_heads, key_dim, value_dim, calls[0].keys.element_size())


def layer_windows(config: Any, num_layers: int) -> list[int | None]:
    """Return the sliding window of each layer, None for full attention.

    Raises:
        NotServedError: if a layer has neither full nor sliding-window attention.
    """
    for name in ("attention_chunk_size", "window_size", "local_attention"):
        if getattr(config, name, None):
            raise NotServedError(f"attention with {name}")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for layer, kind in enumerate(kinds):
        if kind not in windows:
            raise NotServedError(f"{kind} in layer {layer}")
    return [windows[kind] for kind in kinds]


def check_windows(windows: abc.Sequence[int | None], calls: abc.Sequence[AttentionCall]) -> None:
    """Check that each layer passes its configured window to attention.

    The self-check does not find this if its prompt is shorter than the window.

    Raises:
        NotServedError: naming the first layer that does not.
    """
    for call in calls:
        if call.window != windows[call.layer]:
            raise NotServedError(f"a window of {call.window} in layer {call.layer} instead of {windows[call.layer]}")


def longest_sequence(config: Any) -> int:
    """Return the longest sequence to serve: `max_position_embeddings`, or 2048 if it is not set.

    At most the original length if rotary frequencies beyond it depend on the longest sequence of the batch.
    """
    longest = getattr(config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in _ROPE_BY_LENGTH:
            original = parameters.get("original_max_position_embeddings")
            longest = min(longest, original or getattr(config, "original_max_position_embeddings", None) or longest)
    return int(longest)


def widest_layer(config: Any, hidden_size: int) -> int:
    """Return the width of the widest feed-forward layer; 4 * `hidden_size` if no known field has it."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    widths = [getattr(config, name, None) for name in names]
    return max([width for width in widths if isinstance(width, int)], default=4 * hidden_size)
