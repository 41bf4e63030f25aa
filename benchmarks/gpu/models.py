"""Models with random weights, made on the device: ours and transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.sizes import ModelSize
from fastgen.core.step_model import StepModel
from fastgen.engine.calibration import calibrate
from fastgen.engine.core import Engine
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import Checkpoint, EmbeddingTable
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.config.architecture import EMBEDDING, ModelArchitecture
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers.decoder import Decoder
from fastgen.model.layers.gpu_backend import GPUBackend, GPUFormat
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.native import over_ranks
from fastgen.model.partition import Partition
from fastgen.runner.gpu_runner import GPURunner
from fastgen.runner.graphs import CUDAGraphCapture, GraphCapture, token_counts
from fastgen.settings import EngineConfig

# Standard deviation of matrices, as transformers initialises them.
_DEVIATION = 0.02
# Share of the free memory that the KV cache may take.
_CACHE_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class _RandomTensor:
    """Implements `StoredTensor`."""

    shape: tuple[int, ...]
    device: torch.device

    def values(self) -> torch.Tensor:
        """Return the values, which are float32."""
        return self.float32()

    def float32(self) -> torch.Tensor:
        """Return random values for a matrix, and ones for a norm."""
        if len(self.shape) == 1:
            return torch.ones(self.shape, device=self.device)
        return torch.empty(self.shape, device=self.device).normal_(std=_DEVIATION)

    def int8(self) -> Int8Blocks:
        raise NotImplementedError

    def blocks(self) -> None:
        raise NotImplementedError

    def table(self) -> EmbeddingTable:
        raise NotImplementedError


def random_decoder(
    architecture: ModelArchitecture,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    group: RankGroup = ONE_RANK,
) -> Decoder[DeviceInput]:
    """Return a model, or a rank's part of it, for the operators of `fastgen.kernels.gpu`."""
    partition, vocab_size = Partition(group.rank, group.size), architecture.vocab_size
    own = partition.architecture(architecture)
    rows = len(partition.share(vocab_size)), architecture.hidden_size
    shapes = own.tensor_shapes() | dict.fromkeys((EMBEDDING, architecture.head), rows)
    checkpoint = Checkpoint(lambda name: _RandomTensor(shapes[name], device), architecture.head)
    weights = DecoderWeights.load(own, checkpoint, GPUFormat(device, dtype), lambda _fraction: None, partition)
    weights = over_ranks(weights, partition, vocab_size, group)
    ropes = tuple(Rope(rope, longest=max_length) for rope in architecture.rope_configs)
    backend = GPUBackend(own, ropes, max_length, device)
    return Decoder(weights, backend, device=device, dtype=dtype, group=group)


@dataclass(frozen=True, slots=True)
class Ours:
    """A model of ours on a device, with its cache and runner."""

    size: ModelSize
    model: Decoder[DeviceInput]
    cache: KVCache
    runner: GPURunner

    @classmethod
    def make(
        cls,
        size: ModelSize,
        block_size: int,
        max_sequences: int,
        device: torch.device,
        dtype: torch.dtype,
        group: RankGroup = ONE_RANK,
    ) -> Ours:
        """Make the model, and a cache of `size.cache_tokens` or of most of the free memory."""
        model = random_decoder(size.architecture, device, dtype, size.max_length, group)
        num_blocks = size.cache_tokens // block_size
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(device)
            num_blocks = min(num_blocks, int(_CACHE_SHARE * free) // model.kv_shape.block_bytes(block_size))
        cache = KVCache(model.kv_shape, num_blocks, block_size, device=device, dtype=dtype)
        # Zeros would be computed with less power, and so faster.
        cache.keys.normal_()
        cache.values.normal_()
        runner = GPURunner(model, cache, max_model_length=size.max_length, max_sequences=max_sequences, group=group)
        return cls(size, model, cache, runner)

    def capture_graphs(self, most_tokens: int, capture: GraphCapture) -> None:
        """Capture the steps that the engine captures for a token budget of `most_tokens`."""
        self.runner.capture_graphs(
            token_counts(EngineConfig(model="", device="cuda", token_budget=most_tokens)), capture
        )

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Launch steps one by one inside."""
        graphs, self.runner.graphs = self.runner.graphs, None
        try:
            yield
        finally:
            self.runner.graphs = graphs

    def engine(self, max_sequences: int, **settings: Any) -> Engine:
        """Return an engine, calibrated as at the start of a server; on a CPU with a fixed token budget.

        Args:
            max_sequences: sequences that run at the same time.
            settings: further settings of `EngineConfig`.
        """
        config = EngineConfig(
            model="",
            device=self.model.device.type,
            max_sequences=max_sequences,
            block_size=self.cache.block_size,
            prefix_caching=False,
            **{"token_budget": max(64, max_sequences) if self.model.device.type == "cpu" else "auto", **settings},
        )
        config, step_times = calibrate(self.runner, config, lambda _stage, _fraction: None)
        return Engine(self.runner, config, step_model=StepModel.of(step_times))


def graph_capture(device: torch.device) -> GraphCapture | None:
    """Return what captures graphs on a device, or None for a CPU."""
    return CUDAGraphCapture(device) if device.type == "cuda" else None


def transformers_model(size: ModelSize, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model of the same shape, with its attention by torch's SDPA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**size.config)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def static_cache(model: Any, length: int) -> Any:
    """Return an empty static cache of transformers for sequences of `length` tokens."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)
