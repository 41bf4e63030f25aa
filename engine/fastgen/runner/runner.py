"""Runs steps: the forward pass of a model over its KV cache, then sampling."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

import torch

from fastgen.core.scheduler import StepPlan
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.kv_cache.prefault import Prefaulter
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE, KVShape, ModelShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.step_input import StepInput, num_scored
from fastgen.sampling.logprobs import token_logprobs
from fastgen.sampling.sampler import Draw, sample


class Model(Protocol):
    """A loaded model on one device.

    Steps are flat arrays of token ids, positions, slots and block tables (`StepInput`): no padding and no phases.
    """

    @property
    def architecture(self) -> ModelShape:
        """Dimensions of the model."""

    @property
    def kv_shape(self) -> KVShape:
        """Shape of one token's keys and values."""

    @property
    def device(self) -> torch.device:
        """Device of weights and cache."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and cache."""

    def forward(self, step_input: StepInput, cache: KVCache) -> torch.Tensor:
        """Compute a step and write its keys and values to the cache.

        Returns:
            [R, hidden], the input of `head` for each of `step_input.logit_rows`.
        """

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] to logits [R, vocabulary] in float32."""


class ModelRunner:
    """Runs the steps of one model over its KV cache.

    Attributes:
        architecture: dimensions of the model.
        vocab_size, eos_token_ids, num_parameters: of the model.
        num_blocks, block_size: of the KV cache.
        num_host_blocks: blocks in the host buffer for swapped sequences; 0 without one.
        seconds_per_block: seconds to copy one block to or from the host buffer.
        max_model_length: longest prompt plus generation of one request.
        device, dtype: by their names in the configuration.
    """

    def __init__(self, model: Model, cache: KVCache, *, max_model_length: int) -> None:
        self.architecture = model.architecture
        self.vocab_size, self.eos_token_ids = model.architecture.vocab_size, model.architecture.eos_token_ids
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.num_host_blocks = cache.num_host_blocks
        self.seconds_per_block = cache.seconds_per_block() if cache.num_host_blocks else 0.0
        self.max_model_length = max_model_length
        self.num_parameters = model.architecture.num_parameters
        self.device = model.device.type
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._model = model
        self._cache = cache
        self._prefaulter: Prefaulter | None = None

    def start_prefault(self) -> None:
        """Start prefaulting cache memory in the background, ahead of the blocks in use.

        Call it after calibration: prefaulting disturbs measurements of step times.
        """
        self._prefaulter = self._cache.prefaulter
        if self._prefaulter is not None:
            self._prefaulter.ensure_ahead_of(0)

    def wait_for_prefault(self) -> None:
        """Wait until the memory requested so far has been prefaulted."""
        if self._prefaulter is not None:
            self._prefaulter.wait()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Swap blocks, compute the step, sample, and compute the requested prompt logprobs."""
        self._cache.swap(plan.swap_out, plan.swap_in)
        if not plan.chunks:
            return StepOutput([])
        step_input = StepInput.from_plan(plan, block_size=self.block_size)
        if self._prefaulter is not None:
            self._prefaulter.ensure_ahead_of(int(step_input.blocks.max()))
        hidden = self._model.forward(step_input, self._cache)
        draws = [Draw.of(chunk, self.eos_token_ids) for chunk in plan.chunks if chunk.samples]
        sampled = sample(self._model.head(hidden[: step_input.num_sampled]), draws)
        return StepOutput(sampled, self._prompt_logprobs(plan, hidden[step_input.num_sampled :]))

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Return prompt logprobs by index of the chunk, for `hidden` [P, hidden] of the scored rows in chunk order."""
        scored = [(index, chunk, num_scored(chunk)) for index, chunk in enumerate(plan.chunks)]
        next_tokens: list[int] = []
        top: list[int] = []
        for _, chunk, count in scored:
            next_tokens += chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + count]
            top += [chunk.sequence.sampling.prompt_logprobs or 0] * count
        found: list[TokenLogprobs] = []
        # A few rows at a time: the logits of a whole prompt would dominate the step's memory.
        for first in range(0, len(next_tokens), ROWS_SAMPLED_AT_ONCE):
            rows = slice(first, first + ROWS_SAMPLED_AT_ONCE)
            found += token_logprobs(self._model.head(hidden[rows]), next_tokens[rows], top[rows])
        rest = iter(found)
        return {index: list(islice(rest, count)) for index, _, count in scored if count}

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step and return logits [S, vocabulary] in float32, one row per chunk that samples."""
        step_input = StepInput.from_plan(plan, block_size=self.block_size)
        return self._model.head(self._model.forward(step_input, self._cache)[: step_input.num_sampled])
