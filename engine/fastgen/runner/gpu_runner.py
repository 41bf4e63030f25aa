"""Runs steps on a GPU ahead of the host: each is enqueued before the results of the last are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastgen.core.step_output import EagerReason, StepOutput, TokenLogprobs
from fastgen.kernels.gpu.sampling.logprobs import token_logprobs
from fastgen.kernels.gpu.transfers import HostCopy, download, upload
from fastgen.kv_cache.sizing import ROWS_SAMPLED_AT_ONCE
from fastgen.kv_cache.swap import CUDAStreams, Swapper
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import first_line
from fastgen.model.device_errors import is_capture_failure, is_out_of_memory, release_cached_memory
from fastgen.model.device_input import DeviceInput, DeviceRows, InputLayout
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup
from fastgen.model.step_input import StepInput
from fastgen.runner.graphs import ForwardPass, GraphCapture, StepGraphs, token_counts
from fastgen.runner.interface import Mask
from fastgen.runner.pooling import pool, sums_by_sequence
from fastgen.runner.runner import BaseRunner, Model
from fastgen.sampling.device_sampler import DeviceSampler
from fastgen.sampling.host_sampler import row_slices
from fastgen.sampling.logprobs import unpack_logprobs
from fastgen.settings import EngineConfig

log = logging.getLogger("fastgen.model")

# Rows beyond the sequences that may run at once: calibration needs some of its own.
SPARE_ROWS = 64


class GPURunner(BaseRunner[DeviceInput]):
    """Runs the steps of one model over its KV cache, with the state of running sequences on the device.

    Nothing between `launch` and `Ticket.result` waits for the device. The sampling of a step must be enqueued before
    the next step is launched, whose forward pass overwrites what it reads.

    The runners of a divided model are given the same steps. Rank 0 samples, and sends the tokens to the others.
    """

    steps_in_flight = 2

    def __init__(
        self,
        model: Model[DeviceInput],
        cache: KVCache,
        *,
        max_model_length: int,
        max_sequences: int,
        group: RankGroup = ONE_RANK,
    ) -> None:
        super().__init__(model, cache, max_model_length=max_model_length)
        self._group = group
        self._swapper = Swapper(cache, CUDAStreams(model.device) if model.device.type == "cuda" else None)
        max_rows = max_sequences + SPARE_ROWS
        self._num_top = np.full(max_rows, -1)  # of each row, the top logprobs requested with its tokens; -1 for none
        self._sampler = DeviceSampler(self.vocab_size, max_rows, model.device, self.eos_token_ids)
        self._rows = DeviceRows(max_rows, -(-max_model_length // cache.block_size), self._sampler.last_tokens)
        self._last_step: StepInput | None = None
        self._graph_capture: GraphCapture | None = None

    @torch.inference_mode()
    def capture_graphs(
        self,
        token_counts: Sequence[int],
        capture: GraphCapture,
        progress: Callable[[float], None] = lambda _fraction: None,
    ) -> None:
        """Have graphs of forward passes for up to each of `token_counts` tokens, ascending, and graphs of sampling.

        Those that exist are kept, or dropped if they have another count. The first call has the largest count of all.
        If memory runs out or CUDA cannot capture a pass, there are no graphs, and steps run without them; but not on
        several ranks, which replay the same graphs.
        """
        layouts = [InputLayout.padded(count, self._rows.max_rows, self.block_size) for count in token_counts]
        self._graph_capture = capture
        try:
            if self.graphs is None:
                self.graphs = self._new_graphs(layouts[-1])
            self.graphs.capture(layouts, capture, progress)
            return
        except Exception as error:
            if self._group.size > 1 or not (is_out_of_memory(error) or is_capture_failure(error)):
                raise
            reason = first_line(error)
        self.graphs = None
        log.warning(
            "no CUDA graphs of up to %d tokens: %s; steps run without graphs; give --cuda-graphs fewer or smaller "
            "token counts, or off",
            token_counts[-1],
            reason,
        )
        release_cached_memory()

    def prepare_for(self, config: EngineConfig, progress: Callable[[float], None]) -> None:
        """Capture the graphs of steps of up to the token budget that are still missing, and drop larger ones."""
        counts = token_counts(config)
        if self.graphs is None or self._graph_capture is None or counts in ((), self.graphs.token_counts):
            return
        self.capture_graphs(counts, self._graph_capture, progress)
        if self.graphs is not None:
            log.info("%s", self.graphs)

    def _new_graphs(self, largest: InputLayout) -> StepGraphs:
        # The graphs must not refer to the runner: no garbage is collected while the engine starts, and a cycle would
        # keep the memory of a runner that only measures.
        model, cache, sampler, group = self._model, self._cache, self._sampler, self._group

        def sample(hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            logits = model.head(hidden)
            if group.rank:
                return _received(group, sampler, rows, positions)
            return group.broadcast(sampler.sample_without_lists(logits, rows, positions))

        size = largest.num_logit_rows, self.architecture.hidden_size
        hidden = torch.zeros(size, dtype=model.dtype, device=model.device)
        return StepGraphs(largest, self._rows, lambda step: model.forward(step, cache), hidden, sample)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> GPUTicket:
        """Enqueue the swaps, the state updates and the forward pass of a step."""
        self._admit(step)
        self._swapper.enqueue(step.swap_out.tolist(), step.swap_in.tolist(), step.slot_mapping)
        self._last_step = step
        if self.graphs is None:
            return GPUTicket(self, step, self._run(step), "off")
        reason = self.graphs.eager_reason(step)
        return GPUTicket(self, step, self.graphs.replay(step) if reason is None else self._run(step), reason)

    def _admit(self, step: StepInput) -> None:
        """Keep the sampling parameters of a step's new rows."""
        for new in step.new_rows:
            self._sampler.admit(new)
            self._num_top[new.row] = -1 if new.sampling.logprobs is None else new.sampling.logprobs

    def _run(self, step: StepInput) -> ForwardPass:
        """Enqueue a forward pass kernel by kernel, without a graph."""
        device_input = self._rows.apply(step)
        hidden = self._model.forward(device_input, self._cache)
        return ForwardPass(hidden, device_input.sampled_rows, device_input.sampled_positions)

    @torch.inference_mode()
    def sample(self, step: StepInput, forward: ForwardPass, masks: list[Mask]) -> StepResults:
        """Enqueue a step's sampling, prompt logprobs and pooling, and the copies of the results to the host.

        Args:
            step: the step launched last.
            forward: its forward pass.
            masks: [M], the masks of its masked rows.
        """
        assert step is self._last_step, "another step was launched before the sampling of this one"
        num_sampled, hidden = len(step.sampled), forward.hidden
        pooled = pool(step, hidden[num_sampled + len(step.scored_tokens) :])
        sums = None if pooled is None else download(pooled)
        if not num_sampled:
            return StepResults(step, None, [], self._prompt_logprobs(step, hidden), sums)
        if self.graphs is not None and forward.is_replayed and not self._needs_lists(step):
            if self._group.rank == 0:
                self._sampler.flush()
            ids, logprobs = self.graphs.sampling.replay(num_sampled), list[Logprobs]()
        else:
            ids, logprobs = self._sample(step, forward, masks)
        return StepResults(step, download(ids), logprobs, self._prompt_logprobs(step, hidden[num_sampled:]), sums)

    def wait(self, results: StepResults, eager_reason: EagerReason | None) -> StepOutput:
        """Wait for the results of a step; `eager_reason` as in `StepOutput`."""
        return results.wait(eager_reason)

    def _needs_lists(self, step: StepInput) -> bool:
        """Return whether sampling depends on lists of this step or of its rows, which no graph contains.

        They are grammar masks, rows with logprobs, and the biases, bans, bad words and token counts of slots. All other
        parameters (temperature, filters, seed) are columns of the slots, which graphs read.
        """
        rows = step.rows[step.sampled]
        return bool(len(step.masked) or (self._num_top[rows] >= 0).any() or self._sampler.has_lists[rows].any())

    def _sample(self, step: StepInput, forward: ForwardPass, masks: list[Mask]) -> tuple[torch.Tensor, list[Logprobs]]:
        """Enqueue the head, the sampler and the logprobs, kernel by kernel. Return the tokens [N] and the logprobs."""
        logits = self._model.head(forward.hidden[: len(step.sampled)])
        if self._group.rank:
            return _received(self._group, self._sampler, forward.sampled_rows, forward.sampled_positions), []
        masks_and_rows = self._upload_masks(step, masks)
        ids = self._sampler.sample(logits, forward.sampled_rows, forward.sampled_positions, *masks_and_rows)
        self._group.broadcast(ids)
        num_top = self._num_top[step.rows[step.sampled]]
        logprobs = [
            self._logprobs(logits, some, ids, num_top[some].tolist())
            for some in row_slices(np.flatnonzero(num_top >= 0).tolist(), ROWS_SAMPLED_AT_ONCE)
        ]
        return ids, logprobs

    def _upload_masks(self, step: StepInput, masks: list[Mask]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the masks [M, words], and each sampled row's index in them or -1 [N]; (None, None) without masks."""
        if not masks:
            return None, None
        index = np.full(len(step.sampled), -1, np.int32)
        index[step.masked] = np.arange(len(masks), dtype=np.int32)
        device = self._model.device
        return upload(np.stack(masks).view(np.int32), device), upload(index, device)

    def _logprobs(self, logits: torch.Tensor, rows: list[int], ids: torch.Tensor, top: list[int]) -> Logprobs:
        """Enqueue the logprobs of `ids` [N] for some rows of `logits` [N, vocabulary]."""
        index = upload(np.array(rows, np.int32), self._model.device)
        packed = token_logprobs(logits, index, ids.index_select(0, index), max(top))
        return Logprobs(rows, None, top, download(packed))

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor) -> list[Logprobs]:
        """Enqueue the logprobs of P prompt tokens for `hidden`, a few rows at a time to bound memory.

        Args:
            step: the step.
            hidden: [P or more, hidden]; further rows are padding.
        """
        found = []
        sequences = (np.searchsorted(step.query_starts, step.scored_tokens, side="right") - 1).tolist()
        for some in row_slices(list(range(len(sequences))), ROWS_SAMPLED_AT_ONCE):
            part = slice(some[0], some[-1] + 1)
            targets, top = step.scored_targets[part], step.scored_top[part].tolist()
            logits = self._model.head(hidden[part])
            if self._group.rank:
                continue
            index = upload(np.arange(len(some), dtype=np.int32), self._model.device)
            packed = token_logprobs(logits, index, upload(targets, self._model.device), max(top))
            found.append(Logprobs(sequences[part], targets.tolist(), top, download(packed)))
        return found


def _received(group: RankGroup, sampler: DeviceSampler, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Enqueue that another rank's tokens [N] are received and recorded. Return them."""
    tokens = group.broadcast(torch.empty_like(rows))
    sampler.record(tokens, rows, positions)
    return tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities on their way to the host.

    Attributes:
        owners: for each entry, the index of its sampled row or, for prompt tokens, of its sequence.
        tokens: the tokens scored; None for the sampled ones.
        top: number of most likely tokens of each entry.
        packed: as `token_logprobs` returns them.
    """

    owners: list[int]
    tokens: list[int] | None
    top: list[int]
    packed: HostCopy


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a step on their way to the host; `pooled` as `pool` returns them."""

    step: StepInput
    ids: HostCopy | None
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs]
    pooled: HostCopy | None

    @property
    def have_arrived(self) -> bool:
        """Whether `wait` would not wait. It raises an error of the GPU, too."""
        packed = [part.packed for part in (*self.logprobs, *self.prompt_logprobs)]
        return all(copy.has_arrived for copy in (self.ids, self.pooled, *packed) if copy is not None)

    def wait(self, eager_reason: EagerReason | None) -> StepOutput:
        """Wait for all copies and return the results; `eager_reason` as in `StepOutput`."""
        tokens: list[int] = [] if self.ids is None else self.ids.wait().tolist()
        found: dict[int, TokenLogprobs] = {}
        for part in self.logprobs:
            entries = unpack_logprobs(part.packed.wait(), [tokens[row] for row in part.owners], part.top)
            found |= zip(part.owners, entries, strict=True)
        prompt: dict[int, list[TokenLogprobs]] = {}
        for part in self.prompt_logprobs:
            entries = unpack_logprobs(part.packed.wait(), part.tokens or [], part.top)
            for sequence, entry in zip(part.owners, entries, strict=True):
                prompt.setdefault(sequence, []).append(entry)
        sums = sums_by_sequence(self.step, None if self.pooled is None else self.pooled.wait())
        return StepOutput(tokens, found, prompt, sums, eager_reason)


@dataclass(slots=True)
class GPUTicket:
    """A step of a `GPURunner`; implements `fastgen.runner.interface.Ticket`.

    Attributes:
        forward: its forward pass.
    """

    _runner: GPURunner
    _step: StepInput
    forward: ForwardPass
    _eager_reason: EagerReason | None
    _results: StepResults | None = None

    def sample(self, masks: list[Mask]) -> None:
        """Enqueue the sampling."""
        self._results = self._runner.sample(self._step, self.forward, masks)

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""
        assert self._results is not None, "call sample first"
        return self._runner.wait(self._results, self._eager_reason)
