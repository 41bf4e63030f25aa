"""Forward passes captured as CUDA graphs, for a ladder of token counts.

A graph repeats launches with the addresses and sizes of its capture. So its input is padded to the graph's token count,
in a buffer at a fixed address, and its output is copied to another. A graph serves any mixture of prompt chunks and
decodes: launches depend on the number of tokens, not on lengths or on the number of sequences. The head and the sampler
run outside of it. See docs/decisions/015-cuda-graphs.md.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fastgen.core.step_output import EagerReason
from fastgen.core.step_plan import StepPlan
from fastgen.kernels.gpu.transfers import upload_into
from fastgen.model.device_input import DeviceInput, DeviceRows, InputLayout
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.settings import EngineConfig

# Tokens of the largest step that `--cuda-graphs auto` captures. In larger steps the launches are hidden by computation.
_MOST_TOKENS = 4096
# Rows of a tile of a large matrix product: a partly filled one takes as long as a full one.
_TILE_ROWS = 128


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Enqueue the launches again, with the same addresses and sizes."""


class GraphCapture(Protocol):
    """Captures graphs that share one memory pool. Only one of them may run at a time."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return the launches of `run`, which is called twice: first to compile its kernels."""

    def used_bytes(self) -> int:
        """Return the memory in use on the device, without its allocator's unused memory."""


class CUDAGraphCapture:
    """Captures CUDA graphs on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return the launches of `run` as a CUDA graph."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def used_bytes(self) -> int:
        """Return the memory in use on the device, by all programs."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def token_counts(config: EngineConfig) -> tuple[int, ...]:
    """Return the token counts to capture, ascending; none if graphs are off or the device is a CPU.

    With `auto`, padding is at most a quarter of a small step, whose time is that of reading the weights, and less than
    a tile of a matrix product of a larger one.
    """
    if config.cuda_graphs == "off" or config.device != "cuda":
        return ()
    if config.cuda_graphs != "auto":
        return tuple(sorted({min(count, config.most_tokens) for count in config.graph_token_counts}))
    most = min(config.most_tokens, _MOST_TOKENS)
    counts, count = [], 1
    while count < most:
        counts.append(count)
        power = 1 << (count.bit_length() - 1)
        count += min(max(power // 4, 1), _TILE_ROWS)
    return (*counts, most)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward pass that was enqueued.

    Attributes:
        hidden: [R, hidden], the model's output: N rows to sample, then those with prompt logprobs, then those that are
            pooled, then padding.
        sampled_rows, sampled_positions: [N], of its input.
    """

    hidden: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_positions: torch.Tensor


class StepGraphs:
    """The graphs of one runner.

    They share buffers: a step's output is valid until the next step is enqueued.

    Args:
        layouts: of the steps to capture, ascending by tokens.
        rows: the block tables.
        forward: the model's forward pass over the cache.
        hidden: [R, hidden], buffer for the output, with the logit rows of the last layout.
        capture: captures graphs.

    Attributes:
        num_bytes: memory that the graphs take.
        seconds: how long the capture took.
    """

    def __init__(
        self,
        layouts: Sequence[InputLayout],
        rows: DeviceRows,
        forward: Callable[[DeviceInput], torch.Tensor],
        hidden: torch.Tensor,
        capture: GraphCapture,
    ) -> None:
        started, before = time.perf_counter(), capture.used_bytes()
        self._layouts = layouts
        self._rows = rows
        self._forward = forward
        self._hidden = hidden
        self._packed = torch.zeros(layouts[-1].num_elements, dtype=torch.int32, device=hidden.device)
        no_sequences = StepInputBuilder(block_size=1).build(StepPlan(()))
        graphs = []
        # From the largest, whose memory the others reuse.
        for layout in reversed(layouts):
            self._fill(no_sequences, layout)
            graphs.append(capture.capture(partial(self._run, layout)))
        self._graphs = graphs[::-1]
        self.num_bytes = capture.used_bytes() - before
        self.seconds = time.perf_counter() - started

    def __str__(self) -> str:
        """Describe the graphs in one line for the log."""
        first, last = self._layouts[0].num_tokens, self._layouts[-1].num_tokens
        return (
            f"captured {len(self._graphs)} CUDA graphs of {first} to {last} tokens in {self.seconds:.1f} s: they take "
            f"{self.num_bytes >> 20} MiB"
        )

    def eager_reason(self, step: StepInput) -> EagerReason | None:
        """Return why no graph can run the step, or None."""
        if step.num_tokens > self._layouts[-1].num_tokens:
            return "tokens"
        layout = self._layouts[self._index(step)]
        num_logit_rows = len(step.sampled) + len(step.scored_tokens)
        if num_logit_rows > layout.num_logit_rows:
            return "prompt_logprobs"
        if num_logit_rows + len(step.pooled_tokens) > layout.num_logit_rows:
            return "pooling"
        return None

    def replay(self, step: StepInput) -> ForwardPass:
        """Enqueue a step that a graph can run: one upload and the graph.

        Block table entries beyond what the layout has room for take another upload.
        """
        index, num_sampled = self._index(step), len(step.sampled)
        layout = self._layouts[index]
        if step.table_updates.shape[1] > layout.num_updates:
            self._rows.update(step.table_updates[:, layout.num_updates :])
        self._fill(step, layout)
        self._graphs[index].replay()
        return ForwardPass(
            self._hidden,
            layout.part(self._packed, "sampled_rows")[:num_sampled],
            layout.part(self._packed, "sampled_positions")[:num_sampled],
        )

    def _index(self, step: StepInput) -> int:
        """Return the index of the smallest layout with room for the step's tokens."""
        return bisect_left(self._layouts, step.num_tokens, key=lambda layout: layout.num_tokens)

    def _fill(self, step: StepInput, layout: InputLayout) -> None:
        upload_into(self._rows.pack(step, layout), self._packed[: layout.num_elements])

    def _run(self, layout: InputLayout) -> None:
        """Run the forward pass over the buffers: this is what is captured."""
        hidden = self._forward(self._rows.read(self._packed[: layout.num_elements], layout))
        self._hidden[: len(hidden)].copy_(hidden)
