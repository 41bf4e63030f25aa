"""Native models: from what lies on disk to a decoder on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from fastgen.model.checkpoint.gguf import open_gguf
from fastgen.model.checkpoint.safetensors import Checkpoint, open_safetensors
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.layers.backend import Backend
from fastgen.model.layers.decoder import Decoder
from fastgen.model.layers.int8_linear import Int8Placement
from fastgen.model.layers.linear import PackedPlacement, Placement
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.torch_backend import TorchBackend, TorchPlacement
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.source import ModelSource

log = logging.getLogger("fastgen.model")


def load_on_cpu(
    source: ModelSource,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
    quantization: str = "none",
    make_backend: Callable[[ModelArchitecture, Sequence[Rope]], Backend] | None = None,
) -> Decoder:
    """The model at `source` in float32 on the CPUs, by the project's kernels.

    Args:
        source: what to load.
        max_model_length: the longest request asked for; None for as many tokens as are exact.
        progress: hears the share done, 0 to 1.
        quantization: how matrices are kept in memory, as in `EngineConfig`.
        make_backend: called when the weights are there, so that the kernels may be brought meanwhile.

    Raises:
        ModelError: when a tensor cannot be used.
    """
    architecture = source.architecture
    checkpoint = open_checkpoint(source)
    placement: Placement = Int8Placement() if quantization == "int8" else PackedPlacement()
    weights = DecoderWeights.load(architecture, checkpoint, placement, progress)
    ropes = make_ropes(architecture, max_model_length, checkpoint.rope_factors)
    if make_backend is None:
        from fastgen.model.layers.cpu_backend import CPUBackend

        make_backend = CPUBackend
    return Decoder(weights, make_backend(architecture, ropes), device=torch.device("cpu"), dtype=torch.float32)


def load_on_torch(
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_model_length: int | None,
    progress: Callable[[float], None],
) -> Decoder:
    """The model at `source` on any device, by torch's own operations; other arguments as in `load_on_cpu`.

    Raises:
        ModelError: when a tensor cannot be used.
    """
    architecture = source.architecture
    checkpoint = open_checkpoint(source)
    weights = DecoderWeights.load(architecture, checkpoint, TorchPlacement(device, dtype), progress)
    ropes = make_ropes(architecture, max_model_length, checkpoint.rope_factors)
    return Decoder(weights, TorchBackend(architecture, ropes, device), device=device, dtype=dtype)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The tensors of `source`.

    Raises:
        ModelError: naming the tensor that is missing, unknown or of another shape.
    """
    if source.gguf is not None:
        return open_gguf(source.gguf, source.architecture)
    return open_safetensors(source.path, source.architecture)


def make_ropes(
    architecture: ModelArchitecture, max_model_length: int | None, factors: torch.Tensor | None
) -> tuple[Rope, ...]:
    """The rotary angles of each of the architecture's rotaries; `factors` as in `Rope`."""
    exact = architecture.default_length
    longest = max_model_length or exact
    if longest > exact:
        log.warning(
            "--max-model-length %d is beyond %d tokens: the model's long rotary factors serve all requests, and for "
            "those of fewer tokens it was trained with the short ones; leave it at %d if those matter",
            longest,
            exact,
            exact,
        )
    return tuple(Rope(rotary, longest=longest, factors=factors) for rotary in architecture.rotaries)
