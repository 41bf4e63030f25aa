"""Load native models from disk onto a device.

The `load_*` functions take the length of the longest sequence to serve, None for the model's default, and call
`progress` with the fraction loaded, 0 to 1. They raise the errors of `open_checkpoint`, a ModelError if a tensor cannot
be read and, on a GPU, a ConfigError if the driver does not pin memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from fastgen.model.layers.int8_linear import Int8Format
from fastgen.model.layers.linear import PackedFormat, WeightFormat
from fastgen.model.layers.packed_linear import StoredFormat
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.torch_backend import TorchFormat, TorchOperations
from fastgen.model.layers.vocabulary import DividedHead, DividedTable
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.partition import Partition
from fastgen.model.source import ModelSource

log = logging.getLogger("fastgen.model")

_FORMATS: dict[str, type[PackedFormat]] = {"none": PackedFormat, "int8": Int8Format, "stored": StoredFormat}


def load_on_cpu(
    source: ModelSource,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    linear: str | None = None,
    group: RankGroup = ONE_RANK,
    make_backend: Callable[[ModelArchitecture, Sequence[Rope], torch.dtype, bool], Backend[ForwardInput]] | None = None,
) -> Decoder[ForwardInput]:
    """Load the model at `source` for the CPU kernels.

    Args:
        dtype: of weights, activations and cache: float32 or bfloat16.
        quantization: storage of matrices in memory, as in `EngineConfig`.
        linear: the product with matrices that are not quantised, as for `PackedFormat`.
        make_backend: called like `CPUBackend` after the weights are loaded, so that kernels can be imported meanwhile.

    Raises:
        ConfigError: as `PackedFormat`, `Int8Format` and `StoredFormat`.
        ModelError: also as `CPUBackend`.
    """
    weight_format = _FORMATS[quantization](dtype, linear)
    _, weights, ropes = _load(source, weight_format, max_model_length, progress, group)
    if make_backend is None:
        from fastgen.model.layers.cpu_backend import CPUBackend

        make_backend = CPUBackend
    backend = make_backend(weights.architecture, ropes, dtype, weight_format.pads_rows)
    return Decoder(weights, backend, device=torch.device("cpu"), dtype=dtype, group=group)


def load_on_torch(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
    group: RankGroup = ONE_RANK,
) -> Decoder[ForwardInput]:
    """Load the model at `source` on `device` for torch operations."""
    _, weights, ropes = _load(source, TorchFormat(device, dtype), max_model_length, progress, group)
    backend = partial(TorchOperations, weights.architecture, ropes, device)
    return Decoder(weights, backend, device=device, dtype=dtype, group=group)


def load_on_gpu(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cache_dtype: torch.dtype | None = None,
    max_model_length: int | None,
    progress: Callable[[float], None],
    group: RankGroup = ONE_RANK,
) -> Decoder[DeviceInput]:
    """Load the model at `source` for the operators of `fastgen.kernels.gpu`.

    `cache_dtype` is torch.float8_e4m3fn or `dtype`; None for `dtype`.
    """
    from fastgen.model.layers.gpu_backend import GPUBackend, GPUFormat

    checkpoint, weights, ropes = _load(source, GPUFormat(device, dtype), max_model_length, progress, group)
    longest = max_model_length or source.architecture.default_length
    scales = checkpoint.kv_scales if cache_dtype == torch.float8_e4m3fn else None
    if cache_dtype == torch.float8_e4m3fn and scales is None:
        log.warning(
            "the checkpoint has no k_scale and v_scale: the float8 KV cache uses scale 1 and clamps values beyond 448; "
            "use a checkpoint with scales, or --kv-cache-dtype auto, if accuracy suffers"
        )
    backend = GPUBackend(weights.architecture, ropes, longest, device, kv_scales=scales)
    return Decoder(weights, backend, device=device, dtype=dtype, cache_dtype=cache_dtype, group=group)


def _load(
    source: ModelSource,
    weight_format: WeightFormat,
    max_model_length: int | None,
    progress: Callable[[float], None],
    group: RankGroup,
) -> tuple[Checkpoint, DecoderWeights, tuple[Rope, ...]]:
    """Load the rank's part of a model."""
    checkpoint, whole = open_checkpoint(source), source.architecture
    partition = Partition.of(whole, checkpoint, group.rank, group.size, weight_format.block)
    own = partition.checkpoint(checkpoint, whole)
    weights = DecoderWeights.load(partition.architecture(whole), own, weight_format, progress, partition)
    weights = over_ranks(weights, partition, whole.vocab_size, group)
    return checkpoint, weights, make_ropes(whole, max_model_length, checkpoint.rope_factors)


def over_ranks(weights: DecoderWeights, partition: Partition, vocab_size: int, group: RankGroup) -> DecoderWeights:
    """Return a rank's weights with an embedding and a head that reach the whole vocabulary."""
    if group.size == 1:
        return weights
    return replace(
        weights,
        embedding=DividedTable(weights.embedding, partition.share(vocab_size), group),
        head=DividedHead(weights.head, partition.widths(vocab_size), group),
    )


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open the checkpoint of `source`.

    Raises:
        ConfigError: as `open_safetensors`.
        ModelError: as `open_gguf` or `open_safetensors`.
    """
    if source.gguf is not None:
        return open_gguf(source.gguf, source.architecture)
    return open_safetensors(source.path, source.architecture, source.other_parts, source.quantization)


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
