"""Load a Hugging Face directory as a `TransformersModel`, or reject it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fastgen.model import ModelError, first_line
from fastgen.model.device_errors import is_device_error
from fastgen.model.transformers_backend import falcon, paged_attention, self_check
from fastgen.model.transformers_backend.model import TransformersModel
from fastgen.model.transformers_backend.paged_attention import IMPLEMENTATION, NotServedError
from fastgen.model.transformers_backend.shape import layer_windows
from fastgen.text.tokenizer_formats.huggingface import end_token_id


def load_transformers_model(
    directory: Path, *, device: torch.device, dtype: torch.dtype, progress: Callable[[float], None]
) -> TransformersModel:
    """Load the model of a Hugging Face directory and check its logits against transformers' own.

    Weights and cache are on `device` in `dtype`; `progress` is called with the fraction loaded, 0 to 1.

    Raises:
        ConfigError: as `end_token_id`.
        ModelError: naming the architecture if it cannot be served correctly or its code fails, or the file or tensor at
            fault.
    """
    progress(0.0)
    model_class = check_configuration(directory)
    paged_attention.register()
    model, tokenizer_end = _read_weights(directory, model_class, dtype), end_token_id(directory)
    torch.nn.Module.to(model, device)
    progress(0.9)
    try:
        adapted = TransformersModel(model, tokenizer_end)
        self_check.check(adapted, model)
    except ModelError:
        raise
    except NotServedError as error:
        raise ModelError(f"{directory}: {model_class.__name__} cannot be served: it needs {error}") from None
    except Exception as error:  # whatever the model's code raises
        if is_device_error(error):
            raise
        raise _failed(directory, model_class, error) from error
    progress(1.0)
    return adapted


def check_configuration(directory: Path) -> type[PreTrainedModel]:
    """Return transformers' class for the model at `directory`, after checking what can be checked without weights.

    Raises:
        ModelError: if there is none, `architectures` names another class, its attention cannot be replaced or is not
            implemented, it takes no position ids, or the code of its configuration fails.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # whatever transformers makes of values that it does not check
        raise ModelError(
            f"{directory}: config.json does not describe a decoder that transformers implements "
            f"({first_line(error)}): it cannot be served"
        ) from None
    # A model type may have several causal models: `architectures` names the one that was saved.
    architectures, classes = config.architectures, found if isinstance(found, tuple) else (found,)
    model_class: type[PreTrainedModel] = next((c for c in classes if c.__name__ in (architectures or ())), classes[0])
    name = model_class.__name__
    if architectures and name not in architectures:
        raise ModelError(f"{directory}: config.json: architectures is {architectures}: only {name} is supported")
    if config.model_type == "falcon":  # does not look its attention up by name
        falcon.register()
    elif not model_class._can_set_attn_implementation():
        raise ModelError(f"{directory}: {name} cannot be served: its code in transformers has fixed attention")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"{directory}: {name} cannot be served: its code in transformers takes no position_ids")
    try:
        layer_windows(config, getattr(config, "num_hidden_layers", 0))
    except NotServedError as error:
        raise ModelError(f"{directory}: {name} cannot be served: it needs {error}") from None
    except Exception as error:  # whatever the code of its configuration raises
        raise _failed(directory, model_class, error) from error
    return model_class


def _failed(directory: Path, model_class: type[PreTrainedModel], error: Exception) -> ModelError:
    return ModelError(
        f"{directory}: {model_class.__name__} cannot be served: its code in transformers fails with "
        f"{type(error).__name__} ({first_line(error)})"
    )


def _read_weights(directory: Path, model_class: type[PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = model_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise errors of many types
        if is_device_error(error):
            raise
        raise ModelError(f"{directory}: the weights cannot be read: {first_line(error)}") from None
    model, info = loaded
    if info["missing_keys"]:
        name = min(info["missing_keys"])
        raise ModelError(f"{directory}: tensor {name} is missing: the checkpoint is incomplete")
    # Rows have no padding. With a padding token set, some models search their input for it in every step.
    model.config.pad_token_id = None
    evaluating: PreTrainedModel = model.eval()
    return evaluating
