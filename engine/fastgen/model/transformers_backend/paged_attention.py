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

IMPLEMENTATION = "fastgen_paged"
_CONTEXT = "fastgen_context"


class NotServedError(Exception):
    """A model needs something that is not implemented here; the message completes "it needs ..."."""


@dataclass
class StepContext:
    """The attention of one model's layers in the current step.

    Attributes:
        attend: set before each step; called as `TorchPagedAttention.store_and_attend`.
    """

    attend: Callable[..., torch.Tensor] | None = None


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
        sliding_window, softcap, s_aux: as `window`, `softcap` and `sinks` of `TorchPagedAttention.attend`.
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
        raise NotServedError("non-causal attention")
    if len(query) != 1:
        raise NotServedError("attention over its own batch dimension")
    context: StepContext = getattr(module, _CONTEXT)
    assert context.attend is not None, "a layer was called outside of a step"
    attended = context.attend(
        module.layer_idx,
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended[None], None
