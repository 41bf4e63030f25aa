"""Any decoder that transformers holds, run by transformers' own model code over our pages and our scheduler.

Slower than a native model on CPUs, and right: before it serves, a model computes a short prompt both ways
(`adapter_check`), and where the two differ it is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.errors import ModelError
from fastgen.model.layers.torch_attention import TorchPagedAttention
from fastgen.model.step_input import StepInput
from fastgen.model.transformers_backend import falcon, paged_attention, self_check
from fastgen.model.transformers_backend.paged_attention import (
    IMPLEMENTATION,
    AttentionCall,
    NotServedError,
    StepContext,
    bind,
    paged,
)
from fastgen.model.transformers_backend.shape import (
    AdaptedArchitecture,
    check_windows,
    end_tokens,
    kv_shape,
    layer_windows,
    longest_sequence,
    widest_layer,
)

# Model types whose attention is brought along because transformers' own looks nothing up.
_REGISTER: dict[str, Callable[[], None]] = {"falcon": falcon.register}


class TransformersModel:
    """A causal language model of transformers as a `fastgen.runner.runner.Model`.

    Args:
        model: built with our attention's name, in evaluation mode, where it is to run.

    Raises:
        NotServedError: when it asks for attention that there is not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._backbone: Callable[..., BaseModelOutputWithPast] = model.base_model
        self._head = _head_of(model)
        self._context = StepContext()
        bind(model, self._context)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
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
            eos_token_ids=end_tokens(config, model.generation_config),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        )

    @classmethod
    def load(
        cls, directory: Path, *, device: torch.device, dtype: torch.dtype, progress: Callable[[float], None]
    ) -> TransformersModel:
        """The model of a Hugging Face directory, checked; `progress` hears the share done, 0 to 1.

        Raises:
            ModelError: naming the architecture when it cannot be served right, or the file at fault.
        """
        progress(0.0)
        kind = _model_class(directory)
        paged_attention.register()
        model = _read_weights(directory, kind, dtype)
        torch.nn.Module.to(model, device)
        progress(0.9)
        try:
            adapted = cls(model)
            self_check.check(adapted, model)
        except NotServedError as error:
            raise ModelError(f"{directory}: {kind.__name__} cannot be served: it wants {error}") from None
        progress(1.0)
        return adapted

    def forward(self, batch: StepInput, cache: KVCache) -> torch.Tensor:
        """Computes a pass and writes its keys and values to the cache; returns [R, hidden] of the rows with logits."""
        self._context.attend = paged(TorchPagedAttention(batch, cache, self.device))
        token_ids, positions, rows = (
            torch.from_numpy(values).to(self.device) for values in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        return self._run(token_ids, positions).index_select(0, rows)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> logits [R, vocabulary] in float32."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] and [T] -> [T, hidden], as one sequence to transformers: only attention sees more than its own row."""
        output = self._backbone(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0]
        return hidden[0]

    @torch.inference_mode()
    def _probe(self) -> list[AttentionCall]:
        """What each layer asks of attention."""
        calls: list[AttentionCall] = []

        def note(call: AttentionCall) -> torch.Tensor:
            calls.append(call)
            return call.queries.new_zeros(*call.queries.shape[:2], call.values.shape[-1])

        self._context.attend = note
        positions = torch.arange(2, device=self.device)
        self._run(positions, positions)
        return calls


@dataclass
class _BodyOutput(BaseModelOutputWithPast):
    """A body's result, with the further fields that some heads pass on."""

    cross_attentions: None = None
    router_logits: None = None


class _Given(torch.nn.Module):
    """Stands where a causal model's body is: gives its input back as if it were the body's result.

    Bodies that a model reaches into (OPT's `model.decoder`) are this too.
    """

    @property
    def decoder(self) -> _Given:
        """The body's body."""
        return self

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_others: Any) -> _BodyOutput:
        """[1, R, hidden] as it came."""
        return _BodyOutput(last_hidden_state=inputs_embeds)


def _head_of(model: PreTrainedModel) -> Callable[..., Any]:
    """The model without its body: what it does with the body's result, scalings and caps of logits included."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head


def _model_class(directory: Path) -> type[PreTrainedModel]:
    """transformers' class for the model at `directory`.

    Raises:
        ModelError: when there is none, or none that lets its attention be replaced.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"{directory}: config.json is not of a decoder that transformers holds ({_first_line(error)}): not served"
        ) from None
    # A type with several causal models names the one that it was saved as.
    named, kinds = config.architectures, found if isinstance(found, tuple) else (found,)
    kind: type[PreTrainedModel] = next((kind for kind in kinds if kind.__name__ in (named or ())), kinds[0])
    if named and kind.__name__ not in named:
        raise ModelError(f"{directory}: config.json: architectures is {named}: only {kind.__name__} is served")
    if config.model_type in _REGISTER:
        _REGISTER[config.model_type]()
    elif not kind._can_set_attn_implementation():
        raise ModelError(
            f"{directory}: {kind.__name__} cannot be served: its code in transformers lets nobody replace its attention"
        )
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        raise ModelError(f"{directory}: {kind.__name__} cannot be served: its code in transformers takes no positions")
    return kind


def _read_weights(directory: Path, kind: type[PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = kind.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"{directory}: the weights cannot be read: {_first_line(error)}") from None
    model, info = loaded
    if info["missing_keys"]:
        name = min(info["missing_keys"])
        raise ModelError(f"{directory}: tensor {name} is missing: the checkpoint is incomplete")
    # There is no padding here: without a token for it, nobody looks for it in every pass.
    model.config.pad_token_id = None
    evaluating: PreTrainedModel = model.eval()
    return evaluating


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
