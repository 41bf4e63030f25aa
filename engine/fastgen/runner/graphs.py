"""Forward passes captured as CUDA graphs, for a ladder of token counts.

A graph repeats launches with the addresses and sizes of its capture. So its input is padded to the graph's token count,
in a buffer at a fixed address, and its output is copied to another. A graph serves any mixture of prompt chunks and
decodes: launches depend on the number of tokens, not on lengths or on the number of sequences. The head and the sampler
have graphs of their own, by the number of rows. See docs/decisions/015-cuda-graphs.md and 055.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fastgen.core.budget_tuning import measured_sizes
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


class ReportedCapture:
    """Captures a number of graphs, and calls `progress` with the fraction that is done before each."""

    def __init__(self, capture: GraphCapture, count: int, progress: Callable[[float], None]) -> None:
        self._capture = capture
        self._count = count
        self._progress = progress
        self._done = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return the launches of `run` as a graph."""
        self._progress(self._done / self._count)
        graph = self._capture.capture(run)
        self._done += 1
        return graph

    def used_bytes(self) -> int:
        """Return the memory in use on the device."""
        return self._capture.used_bytes()


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


def first_token_counts(config: EngineConfig) -> tuple[int, ...]:
    """Return the token counts to capture before calibration: all, or those that it needs to find the token budget."""
    counts = token_counts(config)
    if not counts or config.budget != "auto" or config.cuda_graphs != "auto":
        return counts
    sizes = [size for size in measured_sizes(config.most_tokens) if size <= counts[-1]]
    return tuple(sorted({*(counts[bisect_left(counts, size)] for size in sizes), counts[-1]}))


def row_counts(token_counts: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Return the numbers of sampled rows to capture, ascending, for graphs of these token counts."""
    return tuple(sorted({min(count, max_rows) for count in token_counts}))


Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward pass that was enqueued.

    Attributes:
        hidden: [R, hidden], the model's output: N rows to sample, then those with prompt logprobs, then those that are
            pooled, then padding.
        sampled_rows, sampled_positions: [N], of its input.
        is_replayed: whether these are buffers of `StepGraphs`.
    """

    hidden: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_positions: torch.Tensor
    is_replayed: bool = False


class SamplingGraphs:
    """Graphs of the head and the sampler, for a ladder of numbers of rows.

    Args:
        buffers: hidden states [R, hidden], and rows and positions [R or more] of the tokens to sample; -1 for padding.
        sample: the head and the sampler: returns tokens [n] int32 for hidden states, rows and positions of n.

    Attributes:
        counts: the numbers of rows that have graphs, ascending.
    """

    def __init__(self, buffers: ForwardPass, sample: Sample) -> None:
        self.counts: Sequence[int] = ()
        self._graphs: Sequence[Graph] = ()
        self._buffers = buffers
        self._sample = sample
        self._tokens = torch.zeros(len(buffers.hidden), dtype=torch.int32, device=buffers.hidden.device)

    def capture(self, counts: Sequence[int], capture: GraphCapture) -> None:
        """Have graphs of these numbers of rows, ascending, and no others. Those that exist are kept."""
        existing = dict(zip(self.counts, self._graphs, strict=True))
        graphs = [existing.get(count) or capture.capture(partial(self._run, count)) for count in reversed(counts)]
        self.counts, self._graphs = counts, graphs[::-1]

    def __str__(self) -> str:
        """Describe the graphs for the log."""
        return f"{len(self._graphs)} of {self.counts[0]} to {self.counts[-1]} sampled rows"

    def replay(self, num_rows: int) -> torch.Tensor:
        """Enqueue the graph of at least `num_rows` rows. Return their tokens, which are valid until the next replay."""
        self._graphs[bisect_left(self.counts, num_rows)].replay()
        return self._tokens[:num_rows]

    def _run(self, count: int) -> None:
        """Sample the first rows of the buffers: this is what is captured."""
        of = self._buffers
        self._tokens[:count].copy_(
            self._sample(of.hidden[:count], of.sampled_rows[:count], of.sampled_positions[:count])
        )


class StepGraphs:
    """The graphs of one runner.

    They share buffers: a step's output is valid until the next step is enqueued.

    Args:
        largest: layout of the largest step that is ever captured.
        rows: the block tables.
        forward: the model's forward pass over the cache.
        hidden: [R, hidden], buffer for the output, with the logit rows of that layout.
        sample: the head and the sampler, see `SamplingGraphs`.

    Attributes:
        sampling: the graphs of the head and the sampler, for the buffers.
        num_bytes: memory that the graphs take.
        seconds: how long the capture took.
    """

    def __init__(
        self,
        largest: InputLayout,
        rows: DeviceRows,
        forward: Callable[[DeviceInput], torch.Tensor],
        hidden: torch.Tensor,
        sample: Sample,
    ) -> None:
        self._layouts: Sequence[InputLayout] = ()
        self._graphs: Sequence[Graph] = ()
        self._rows = rows
        self._forward = forward
        self._hidden = hidden
        self._packed = torch.zeros(largest.num_elements, dtype=torch.int32, device=hidden.device)
        sampled_rows, sampled_positions = (
            largest.part(self._packed, name) for name in ("sampled_rows", "sampled_positions")
        )
        self.sampling = SamplingGraphs(ForwardPass(hidden, sampled_rows, sampled_positions), sample)
        self.num_bytes = 0
        self.seconds = 0.0

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The token counts that have graphs, ascending."""
        return tuple(layout.num_tokens for layout in self._layouts)

    def capture(self, layouts: Sequence[InputLayout], capture: GraphCapture, progress: Callable[[float], None]) -> None:
        """Have graphs of these layouts, ascending by tokens, and no others. Those that exist are kept.

        `progress` is called with the fraction that is captured, 0 to 1.
        """
        started, before = time.perf_counter(), capture.used_bytes()
        existing = dict(zip(self.token_counts, self._graphs, strict=True))
        counts = row_counts([layout.num_tokens for layout in layouts], self._rows.max_rows)
        missing = {layout.num_tokens for layout in layouts} - existing.keys(), set(counts) - set(self.sampling.counts)
        reported = ReportedCapture(capture, sum(map(len, missing)), progress)
        no_sequences = StepInputBuilder(block_size=1).build(StepPlan(()))
        graphs = []
        # From the largest, whose memory the others reuse.
        for layout in reversed(layouts):
            self._fill(no_sequences, layout)
            graphs.append(existing.get(layout.num_tokens) or reported.capture(partial(self._run, layout)))
        self._layouts, self._graphs = layouts, graphs[::-1]
        self.sampling.capture(counts, reported)
        self.num_bytes += capture.used_bytes() - before
        self.seconds += time.perf_counter() - started

    def __str__(self) -> str:
        """Describe the graphs in one line for the log."""
        first, last = self._layouts[0].num_tokens, self._layouts[-1].num_tokens
        return (
            f"captured {len(self._graphs)} CUDA graphs of {first} to {last} tokens and {self.sampling} in "
            f"{self.seconds:.1f} s: they take {self.num_bytes >> 20} MiB"
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
            is_replayed=True,
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
