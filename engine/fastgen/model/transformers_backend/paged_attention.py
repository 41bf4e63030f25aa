"""Paged attention as an attention function of transformers.

transformers looks attention functions up by name (`AttentionInterface`). A model built with the name `IMPLEMENTATION`
calls `attention` in each layer and builds no masks. `bind` attaches the model's `StepContext` to its layers, where
`attention` finds what to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from fastgen.model.layers.torch_attention import TorchPagedAttention

IMPLEMENTATION = "fastgen_paged"
_CONTEXT = "fastgen_context"


class NotServedError(Exception):
    """A model needs attention that is not implemented here; the message completes "it needs ..."."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one layer passes to attention.

    Attributes:
        layer: index of the layer.
        queries: [T, heads, head_dim].
        keys, values: [T, kv heads, head_dim].
        scale, window, softcap, sinks: as in `TorchPagedAttention.attend`.
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


Attend = Callable[[AttentionInputs], torch.Tensor]


class StepContext:
    """The attention of one model's layers in the current step: `attend` is set before each step."""

    def __init__(self) -> None:
        self.attend: Attend = _no_step


def _no_step(_call: AttentionInputs) -> torch.Tensor:
    raise AssertionError("a layer was called outside of a step")


def paged(attention: TorchPagedAttention) -> Attend:
    """Return a function that stores a layer's keys and values, then attends."""

    def attend(call: AttentionInputs) -> torch.Tensor:
        attention.store(call.layer, call.keys, call.values)
        return attention.attend(
            call.layer,
            call.queries,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    return attend


def register() -> None:
    """Register `attention` with transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, attention)


def bind(model: torch.nn.Module, context: StepContext) -> None:
    """Attach `context` to every layer of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _CONTEXT, context)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature that transformers expects.

    Args:
        module: the layer.
        query, key, value: [1, heads or kv heads, T, head_dim].
        attention_mask: None, because no mask function is registered under our name.
        scaling: factor of the scores; 1 / sqrt(head_dim) by default.
        sliding_window, softcap, s_aux: window, softcap and sinks.
        position_bias, is_causal: rejected unless attention is causal without a bias.

    Returns:
        [1, T, heads, head_dim], and no attention weights.

    Raises:
        NotServedError: naming what is not implemented.
    """
    if attention_mask is not None:
        raise NotServedError("its own attention mask")
    if position_bias is not None:
        raise NotServedError("a position bias on the scores")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotServedError("attention that is not causal")
    if len(query) != 1:
        raise NotServedError("attention over its own batch dimension")
    attend: Attend = getattr(module, _CONTEXT).attend
    call = AttentionInputs(
        layer=module.layer_idx,
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attend(call)[None], None
