"""Any decoder that transformers implements, run by its own model code.

It uses this engine's scheduler and paged KV cache. On CPUs it is slower than a native model. `load` rejects a model
whose logits differ from transformers' own (`self_check`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.config.end_tokens import end_tokens, eos_token_ids
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.torch_attention import TorchPagedAttention
from fastgen.model.transformers_backend.paged_attention import StepContext, bind
from fastgen.model.transformers_backend.shape import (
    AdaptedArchitecture,
    AttentionCall,
    check_windows,
    kv_shape,
    layer_windows,
    longest_sequence,
    widest_layer,
)


class TransformersModel:
    """A causal language model of transformers as a `fastgen.runner.runner.Model`.

    Args:
        model: built with the attention `paged_attention.IMPLEMENTATION`, in evaluation mode, on its device.
        tokenizer_end: the id of the tokenizer's `eos_token`; None if it has none.

    Raises:
        NotServedError: if it needs attention that is not implemented.
        ModelError: if an `eos_token_id` is neither an id nor a list of ids.
    """

    def __init__(self, model: PreTrainedModel, tokenizer_end: int | None = None) -> None:
        self._model = model
        self._backbone: Callable[..., BaseModelOutputWithPast] = model.base_model
        self._head = _head_of(model)
        self._context = StepContext()
        bind(model, self._context)
        parameter = next(model.parameters())
        self.device, self.dtype, self.cache_dtype = parameter.device, parameter.dtype, parameter.dtype
        config = model.config
        windows = layer_windows(config, config.num_hidden_layers)
        calls = self._probe()
        self.kv_shape = kv_shape(calls)
        check_windows(windows, calls)
        self.architecture = AdaptedArchitecture(
            name=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=widest_layer(config, config.hidden_size),
            num_layers=len(calls),
            num_heads=calls[0].queries.shape[1],
            max_position_embeddings=longest_sequence(config),
            eos_token_ids=end_tokens(_end_of(config), _end_of(model.generation_config), tokenizer_end),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        )

    def forward(self, forward_input: ForwardInput, cache: KVCache) -> torch.Tensor:
        """Compute a step and return the last hidden states [R, hidden] of its `logit_rows`.

        The step's keys and values are written to the cache.
        """
        self._context.attend = TorchPagedAttention(forward_input, cache, self.device).store_and_attend
        token_ids, positions, rows = (
            torch.from_numpy(values).to(self.device)
            for values in (forward_input.token_ids, forward_input.positions, forward_input.logit_rows)
        )
        return self._run(token_ids, positions).index_select(0, rows)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] to logits [R, vocabulary] in float32."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()  # a head of another kind than a linear layer has the model's type

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run token ids [T] at positions [T] as one sequence: [T, hidden]. Only attention mixes rows."""
        output = self._backbone(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0]
        return hidden[0]

    @torch.inference_mode()
    def _probe(self) -> list[AttentionCall]:
        """Run two tokens and record the attention calls of all layers."""
        calls: list[AttentionCall] = []

        def record(
            layer: int,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            *,
            window: int | None,
            **_others: Any,
        ) -> torch.Tensor:
            calls.append(AttentionCall(layer, queries, keys, values, window))
            return queries.new_zeros(*queries.shape[:2], values.shape[-1])

        self._context.attend = record
        positions = torch.arange(2, device=self.device)
        self._run(positions, positions)
        return calls


def _end_of(config: Any) -> frozenset[int]:
    return eos_token_ids(getattr(config, "eos_token_id", None))


@dataclass
class _BodyOutput(BaseModelOutputWithPast):
    """The output of a model's body, with the extra fields that some heads pass on."""

    cross_attentions: None = None
    router_logits: None = None


class _IdentityBody(torch.nn.Module):
    """Replaces a causal model's body: returns its input as the body's output."""

    @property
    def decoder(self) -> _IdentityBody:
        """OPT calls `model.decoder` instead of `model`."""
        return self

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_others: Any) -> _BodyOutput:
        """Return inputs_embeds [1, R, hidden] unchanged."""
        return _BodyOutput(last_hidden_state=inputs_embeds)


class _Float32Head(torch.nn.Module):
    """Replaces a linear output head: its results are float32."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._product = TorchHead(linear.weight, linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [1, R, vocabulary] for [1, R, hidden]."""
        return self._product(hidden[0])[None]


def _head_of(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the model without its body: the head, with its scaling and capping of logits, which are float32."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _IdentityBody()}
    for name, module in model._modules.items():
        if type(module) is torch.nn.Linear and module is model.get_output_embeddings():  # type: ignore[no-untyped-call]
            head._modules[name] = _Float32Head(module)
    return head
