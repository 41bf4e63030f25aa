"""Load native models from disk onto a device.

The `load_*` functions take the length of the longest sequence to serve, None for the model's default, and call
`progress` with the fraction loaded, 0 to 1. They raise the errors of `open_checkpoint`, a ModelError if a tensor cannot
be read and, on a GPU, a ConfigError if the driver does not pin memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fastgen.model.checkpoint.checkpoint import Checkpoint
from fastgen.model.checkpoint.gguf import open_gguf
from fastgen.model.checkpoint.safetensors import open_safetensors
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.device_input import DeviceInput
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.backend import Backend
from fastgen.model.layers.decoder import Decoder
from fastgen.model.layers.gpu_backend import GPUBackend, GPUFormat
from fastgen.model.layers.int8_linear import Int8Format
from fastgen.model.layers.linear import PackedFormat, WeightFormat
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.torch_backend import TorchFormat, TorchOperations
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.source import ModelSource

log = logging.getLogger("fastgen.model")


def load_on_cpu(
    source: ModelSource,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    make_backend: Callable[[ModelArchitecture, Sequence[Rope], torch.dtype, bool], Backend[ForwardInput]] | None = None,
) -> Decoder[ForwardInput]:
    """Load the model at `source` for the CPU kernels.

    Args:
        dtype: of weights, activations and cache: float32 or bfloat16.
        quantization: storage of matrices in memory, as in `EngineConfig`.
        make_backend: called like `CPUBackend` after the weights are loaded, so that kernels can be imported meanwhile.

    Raises:
        ConfigError: as `PackedFormat` and `Int8Format`.
        ModelError: also as `CPUBackend`.
    """
    weight_format = Int8Format(dtype) if quantization == "int8" else PackedFormat(dtype)
    _, weights, ropes = _load(source, weight_format, max_model_length, progress)
    if make_backend is None:
        from fastgen.model.layers.cpu_backend import CPUBackend

        make_backend = CPUBackend
    backend = make_backend(source.architecture, ropes, dtype, weight_format.pads_rows)
    return Decoder(weights, backend, device=torch.device("cpu"), dtype=dtype)


def load_on_torch(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
) -> Decoder[ForwardInput]:
    """Load the model at `source` on `device` for torch operations."""
    _, weights, ropes = _load(source, TorchFormat(device, dtype), max_model_length, progress)
    return Decoder(weights, partial(TorchOperations, source.architecture, ropes, device), device=device, dtype=dtype)


def load_on_gpu(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None = None,
    max_model_length: int | None,
    progress: Callable[[float], None],
) -> Decoder[DeviceInput]:
    """Load the model at `source` for the operators of `fastgen.kernels.gpu`.

    `cache_dtype` is torch.float8_e4m3fn or `dtype`; None for `dtype`.
    """
    checkpoint, weights, ropes = _load(source, GPUFormat(device, dtype), max_model_length, progress)
    longest = max_model_length or source.architecture.default_length
    scales = checkpoint.kv_scales if cache_dtype == torch.float8_e4m3fn else None
    if cache_dtype == torch.float8_e4m3fn and scales is None:
        log.warning(
            "the checkpoint has no k_scale and v_scale: the float8 KV cache uses scale 1 and clamps values beyond 448; "
            "use a checkpoint with scales, or --kv-cache-dtype auto, if accuracy suffers"
        )
    backend = GPUBackend(source.architecture, ropes, longest, device, kv_scales=scales)
    return Decoder(weights, backend, device=device, dtype=dtype, cache_dtype=cache_dtype)


def _load(
    source: ModelSource,
    weight_format: WeightFormat,
    max_model_length: int | None,
    progress: Callable[[float], None],
) -> tuple[Checkpoint, DecoderWeights, tuple[Rope, ...]]:
    checkpoint = open_checkpoint(source)
    weights = DecoderWeights.load(source.architecture, checkpoint, weight_format, progress)
    return checkpoint, weights, make_ropes(source.architecture, max_model_length, checkpoint.rope_factors)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open the checkpoint of `source`.

    Raises:
        ConfigError: as `open_safetensors`.
        ModelError: as `open_gguf` or `open_safetensors`.
    """
    if source.gguf is not None:
        return open_gguf(source.gguf, source.architecture)
    return open_safetensors(source.path, source.architecture)


def make_ropes(
    architecture: ModelArchitecture, max_model_length: int | None, factors: torch.Tensor | None
) -> tuple[Rope, ...]:
    """Return a `Rope` for each of the architecture's configurations; `factors` as in `Rope`."""
    longest = max_model_length or architecture.default_length
    exact = architecture.longest_with_short_factors
    if exact is not None and longest > exact:
        log.warning(
            "--max-model-length %d exceeds %d tokens: all requests use the model's long rotary factors, which "
            "are inexact for sequences of up to %d tokens; lower --max-model-length to %d for exact results",
            longest,
            exact,
            exact,
            exact,
        )
    return tuple(Rope(rope, longest=longest, factors=factors) for rope in architecture.rope_configs)
