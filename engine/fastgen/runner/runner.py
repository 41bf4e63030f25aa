"""Runs steps: the forward pass of a model over its KV cache, then sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch

from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.kv_cache.prefault import Prefaulter
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE, KVShape, ModelShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import ForwardInput, HostRows
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Mask
from fastgen.runner.pooling import pool, sums_by_sequence
from fastgen.sampling.host_sampler import HostSampler
from fastgen.sampling.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastgen.runner.graphs import StepGraphs
    from fastgen.settings import EngineConfig

Input = TypeVar("Input", contravariant=True)


class Model(Protocol[Input]):
    """A loaded model on one device, whose forward pass takes its input on the host or on the device.

    Steps are flat arrays of token ids, positions, slots and block tables, without phases: a `ForwardInput`, or a
    `DeviceInput`, which may be padded.

    Attributes:
        architecture: dimensions of the model.
        kv_shape: shape of one token's keys and values.
        device: of weights and cache.
        dtype: of activations.
        cache_dtype: of keys and values in the cache.
    """

    kv_shape: KVShape
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def architecture(self) -> ModelShape:
        """Dimensions of the model."""

    def forward(self, forward_input: Input, cache: KVCache) -> torch.Tensor:
        """Compute a step and write its keys and values to the cache.

        Returns:
            [R, hidden], the input of `head` for each of `forward_input.logit_rows`.
        """

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] to logits [R, vocabulary] in float32."""


class BaseRunner(Generic[Input]):
    """A model and its KV cache, with the attributes of `fastgen.runner.interface.Runner` and these.

    Attributes:
        architecture: dimensions of the model.
        num_parameters: of the model.
        device, dtype: by their names in the configuration.
        graphs: the captured forward passes, if any.
    """

    steps_in_flight = 1
    graphs: StepGraphs | None = None

    def __init__(self, model: Model[Input], cache: KVCache, *, max_model_length: int) -> None:
        self.architecture = shape = model.architecture
        self.vocab_size, self.eos_token_ids = shape.vocab_size, shape.eos_token_ids
        self.num_parameters = shape.num_parameters
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.num_host_blocks, self.num_state_slots = cache.num_host_blocks, cache.num_state_slots
        self.window_group = cache.window_group
        self.seconds_per_block = cache.seconds_per_block() if cache.num_host_blocks else 0.0
        self.max_model_length = max_model_length
        self.device = model.device.type
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._model = model
        self._cache = cache

    def prepare_for(self, config: EngineConfig, progress: Callable[[float], None]) -> None:
        """Do nothing: only graphs depend on the token budget that calibration has found."""

    def start_prefault(self) -> None:
        """Do nothing: memory of a GPU is allocated up front."""

    def check(self) -> None:
        """Do nothing: the model runs in this process alone."""


class ModelRunner(BaseRunner[ForwardInput]):
    """Runs the steps of one model over its KV cache, one at a time, with its input prepared on the host."""

    def __init__(self, model: Model[ForwardInput], cache: KVCache, *, max_model_length: int) -> None:
        super().__init__(model, cache, max_model_length=max_model_length)
        self._rows = HostRows(cache.block_size)
        self._sampler = HostSampler(self.vocab_size, self.eos_token_ids)
        self._prefaulters: list[Prefaulter] = []

    def start_prefault(self) -> None:
        """Prefault the first blocks of the cache, then stay ahead of the blocks in use, in the background.

        Call it after calibration: prefaulting disturbs measurements of step times.
        """
        for cache in (self._cache, self._cache.windowed):
            if cache is not None and cache.prefaulter is not None:
                cache.prefaulter.start()
                self._prefaulters.append(cache.prefaulter)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> HostTicket:
        """Swap blocks and compute the step. Returns when both are done, or enqueued on a GPU."""
        self._cache.swap(step.swap_out.tolist(), step.swap_in.tolist())
        for parameters in step.new_rows:
            self._sampler.admit(parameters)
        forward_input = self._rows.apply(step)
        for prefaulter, placed in zip(self._prefaulters, (forward_input, forward_input.windowed), strict=False):
            assert placed is not None
            prefaulter.ensure_ahead_of(int(placed.blocks.max()))
        return HostTicket(self, step, self._model.forward(forward_input, self._cache))

    @torch.inference_mode()
    def sample(self, step: StepInput, hidden: torch.Tensor, masks: list[Mask]) -> StepOutput:
        """Sample, compute the requested prompt logprobs, and pool.

        Args:
            step: the step launched last.
            hidden: [N + P + Q, hidden], the model's output for it.
            masks: [M], the masks of its masked rows.
        """
        num_sampled, num_logit_rows = len(step.sampled), len(step.sampled) + len(step.scored_tokens)
        rows, positions = step.rows[step.sampled], step.seq_lens[step.sampled]
        masks_by_index = dict(zip(step.masked.tolist(), masks, strict=True))
        tokens, logprobs = self._sampler.sample(self._model.head(hidden[:num_sampled]), rows, positions, masks_by_index)
        self._rows.last_ids[rows] = tokens
        return StepOutput(
            tokens,
            logprobs,
            self._prompt_logprobs(step, hidden[num_sampled:num_logit_rows]),
            sums_by_sequence(step, pool(step, hidden[num_logit_rows:])),
        )

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Return prompt logprobs by index of the sequence, for `hidden` [P, hidden] of the scored tokens."""
        found: dict[int, list[TokenLogprobs]] = {}
        targets, top = step.scored_targets.tolist(), step.scored_top.tolist()
        sequences = np.searchsorted(step.query_starts, step.scored_tokens, side="right") - 1
        # A few rows at a time: the logits of a whole prompt would dominate the step's memory.
        for first in range(0, len(targets), ROWS_SAMPLED_AT_ONCE):
            some = slice(first, first + ROWS_SAMPLED_AT_ONCE)
            logprobs = token_logprobs(self._model.head(hidden[some]), targets[some], top[some])
            for sequence, entry in zip(sequences[some].tolist(), logprobs, strict=True):
                found.setdefault(sequence, []).append(entry)
        return found

    @torch.inference_mode()
    def logits(self, step: StepInput) -> torch.Tensor:
        """Compute a step and return logits [N, vocabulary] in float32, one row for each sequence that samples."""
        return self._model.head(self._model.forward(self._rows.apply(step), self._cache)[: len(step.sampled)])


@dataclass(slots=True)
class HostTicket:
    """A step of a `ModelRunner`; implements `fastgen.runner.interface.Ticket`."""

    _runner: ModelRunner
    _step: StepInput
    _hidden: torch.Tensor
    _output: StepOutput | None = None

    def sample(self, masks: list[Mask]) -> None:
        """Sample the tokens, and compute the other results."""
        self._output = self._runner.sample(self._step, self._hidden, masks)

    def result(self) -> StepOutput:
        """Return the results."""
        assert self._output is not None, "call sample first"
        return self._output
