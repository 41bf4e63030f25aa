"""Runs passes: a model, its KV cache and sampling, on whatever device the model is on."""

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
    """A forward pass over given weights, on one device.

    Passes are flat: token ids, positions, slots and block tables (`StepInput`), no padding and no phases.
    """

    @property
    def architecture(self) -> ModelShape:
        """The model's shape."""

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in the cache."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache."""

    def forward(self, batch: StepInput, cache: KVCache) -> torch.Tensor:
        """Computes a pass and writes its keys and values to the cache.

        Returns:
            [R, hidden], what the head reads, for each of `batch.logit_rows`.
        """

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> logits [R, vocabulary] in float32."""


class ModelRunner:
    """Passes of one model over its KV cache.

    Attributes:
        architecture: the model's shape.
        vocab_size, eos_token_ids: of the model.
        num_blocks, block_size: the KV cache.
        num_host_blocks: of the buffer in host memory that blocks are swapped to; 0 where there is none.
        seconds_per_block: what copying a block there or back takes.
        max_model_length: longest prompt plus generation of one request.
        num_parameters: of the model.
        device, dtype: where and in what numbers it runs, as the configuration names them.
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
        """Copies the blocks that the pass swaps, computes it, samples, and scores the prompts that ask for it."""
        self._cache.swap(plan.swap_out, plan.swap_in)
        if not plan.chunks:
            return StepOutput([])
        batch = StepInput.from_plan(plan, block_size=self.block_size)
        if self._prefaulter is not None:
            self._prefaulter.ensure_ahead_of(int(batch.blocks.max()))
        hidden = self._model.forward(batch, self._cache)
        draws = [Draw.of(chunk, self.eos_token_ids) for chunk in plan.chunks if chunk.samples]
        sampled = sample(self._model.head(hidden[: batch.num_sampled]), draws)
        return StepOutput(sampled, self._prompt_logprobs(plan, hidden[batch.num_sampled :]))

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """By index of the chunk; `hidden` [P, hidden] are the rows that are scored, in the order of the chunks."""
        scored = [(index, chunk, num_scored(chunk)) for index, chunk in enumerate(plan.chunks)]
        next_tokens: list[int] = []
        top: list[int] = []
        for _, chunk, count in scored:
            next_tokens += chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + count]
            top += [chunk.sequence.sampling.prompt_logprobs or 0] * count
        found: list[TokenLogprobs] = []
        # A few rows at a time: the logits of a whole prompt would be larger than all else in the pass.
        for first in range(0, len(next_tokens), ROWS_SAMPLED_AT_ONCE):
            rows = slice(first, first + ROWS_SAMPLED_AT_ONCE)
            found += token_logprobs(self._model.head(hidden[rows]), next_tokens[rows], top[rows])
        rest = iter(found)
        return {index: list(islice(rest, count)) for index, _, count in scored if count}

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes a pass; returns [S, vocabulary] float32, a row for each chunk that samples."""
        batch = StepInput.from_plan(plan, block_size=self.block_size)
        return self._model.head(self._model.forward(batch, self._cache)[: batch.num_sampled])
