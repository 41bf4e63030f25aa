"""Our attention in the place of transformers' own, for models that run by transformers' model code.

transformers looks attention functions up by name (`AttentionInterface`); a model built with this name calls
`attention` in each of its layers, and its mask functions make no masks. What a layer has to do is found on the layer
itself: `bind` hangs the model's `StepContext` there.
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
    """What a model's code wants of its attention and does not get here; the message completes "it wants ..."."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks for.

    Attributes:
        layer: which one.
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


Attend = Callable[[AttentionCall], torch.Tensor]


class StepContext:
    """What the layers of one model do in the pass under way: `attend` is set before each."""

    def __init__(self) -> None:
        self.attend: Attend = _no_step


def _no_step(_call: AttentionCall) -> torch.Tensor:
    raise AssertionError("a layer was called outside of a pass")


def paged(attention: TorchPagedAttention) -> Attend:
    """Stores a layer's keys and values, then attends."""

    def attend(call: AttentionCall) -> torch.Tensor:
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
    """Makes the name known to transformers. May be called again."""
    AttentionInterface.register(IMPLEMENTATION, attention)


def bind(model: torch.nn.Module, context: StepContext) -> None:
    """Lets every layer of a model find `context`."""
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
    """An attention function as transformers calls it.

    Args:
        module: the layer.
        query, key, value: [1, heads or kv heads, T, head_dim].
        attention_mask: None, since no mask function is known by our name.
        scaling: on the scores; 1 / sqrt(head_dim) where not given.
        sliding_window, softcap, s_aux: window, softcap and sinks.
        position_bias, is_causal: refused where they say something else than causal attention without a bias.

    Returns:
        [1, T, heads, head_dim], and no attention weights.

    Raises:
        NotServedError: naming what is wanted.
    """
    if attention_mask is not None:
        raise NotServedError("a mask of its own")
    if position_bias is not None:
        raise NotServedError("a bias on the scores by position")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotServedError("attention that is not causal")
    if len(query) != 1:
        raise NotServedError("attention over a batch of its own")
    attend: Attend = getattr(module, _CONTEXT).attend
    call = AttentionCall(
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
