"""What is measured: for each quantity its floor and prediction on an H200, what it should reach at least, and the aim.

Floors and predictions are computed, so that the page and the model do not differ. What is asked for is judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.counts import Work, step_work
from benchmarks.gpu.prediction import (
    GPUS,
    PRODUCTS,
    predicted_capture_seconds,
    predicted_eager_seconds,
    predicted_graph_bytes,
    predicted_requests_rate,
    predicted_seconds,
    predicted_tail,
    predicted_transformers_seconds,
)
from benchmarks.gpu.sizes import ModelSize, Sizes
from fastgen.runner.graphs import token_counts
from fastgen.settings import EngineConfig

# Tokens of a step of other engines by default, and of vLLM's on GPUs with over 70 GiB.
FIXED_BUDGET: Final = 2048
VLLM_BUDGET: Final = 8192
# Peaks by NVIDIA's data sheets: bytes per second, and bfloat16 operations per second without sparsity.
DATA_SHEETS: Final = {"H100 SXM": (3.35e12, 989e12), "H200 SXM": (4.8e12, 989e12)}

_NAME: Final = "H200 SXM"
_BELOW: Final = "[below](#bytes-and-operations-of-a-step)"
_Shape = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Aim:
    """A row of the table.

    Attributes:
        quantity: what is measured.
        predicted: on an H200.
        sections: of the benchmark that measure it.
        floor: on an H200; empty without one.
        least, aim: what it should reach; empty if nothing is asked for.
    """

    quantity: str
    predicted: str
    sections: tuple[str, ...]
    floor: str = ""
    least: str = ""
    aim: str = ""


def aims(sizes: Sizes) -> list[Aim]:
    """Return the quantities in the order of the page."""
    s, large, small, mixture = sizes, sizes.large, sizes.small, sizes.mixture
    gpu = GPUS[_NAME]
    one, many, prompt = [(1, s.decode_context)], [(1, s.batch_context)] * s.batch, [(s.prefill, s.prefill)]
    counts = token_counts(EngineConfig(model="", device="cuda"))

    def ms(size: ModelSize, shape: _Shape) -> float:
        return predicted_seconds(gpu, size.architecture, shape) * 1e3

    def eager(size: ModelSize) -> float:
        return predicted_eager_seconds(gpu, size.architecture, one) * 1e3

    def theirs(shape: _Shape) -> float:
        return predicted_transformers_seconds(gpu, large.architecture, shape) * 1e3

    share = step_work(large.architecture, many).num_bytes / (ms(large, many) / 1e3) / DATA_SHEETS[_NAME][0]
    tail = predicted_tail(gpu, large.architecture, s)
    streams = [(1, s.decode_context)] * s.streams
    alone = f"{ms(s.longest_model, streams):.1f} ms before and after"

    def beside(budget: int) -> float:
        return ms(s.longest_model, [*streams, (budget - s.streams, s.long_prompt)])

    capture = predicted_capture_seconds(gpu, large.architecture, counts)
    graph_bytes = predicted_graph_bytes(large.architecture, counts[-1])
    prompts = f"{s.long_prompts} prompts of {s.long_prompt:,} tokens"
    latencies = "p50, p99 and longest inter-token latency"
    return [
        Aim(
            f"{large.label}, decode step of one sequence", f"{ms(large, one):.1f} ms", ("decode",),
            _floor(large, one), "4.7 ms", "4.0 ms",
        ),
        Aim(
            f"{large.label}, prefill of {s.prefill:,} tokens", f"{ms(large, prompt):.0f} ms", ("prefill",),
            _floor(large, prompt), "60 ms", "50 ms",
        ),
        Aim(
            f"{large.label}, {s.batch} decodes at {s.batch_context:,} tokens: share of the bandwidth",
            f"{share * 100:.0f} %", ("batch",), "", "66 %", "75 %",
        ),
        Aim(
            f"{small.label}, decode step of one sequence", f"{ms(small, one):.2f} ms", ("small-decode",),
            _floor(small, one), "1.6 ms", "1.0 ms",
        ),
        Aim(
            f"{small.label}, {s.requests} requests, {s.shortest} to {s.longest:,} tokens in and out: output tok/s",
            f"{predicted_requests_rate(gpu, small, s):,.0f}", ("requests",), "", "15,000", "25,000",
        ),
        Aim(
            f"{large.label}, {s.clients} clients, prompts of {s.prompt:,} and generations of {s.generation} tokens: "
            "p99 inter-token latency over the median",
            f"1.0: with the budget of {tail.token_budget} that the predicted curve gives, nearly every step is full, "
            f"of {tail.seconds * 1e3:.1f} ms",
            ("tail",), "", "2", "1.3",
        ),
        Aim(
            f"{large.label}, {s.streams} decodes before, during and after {prompts}, with the default target and "
            f"with a fixed budget of {FIXED_BUDGET:,}: {latencies}",
            f"{alone}; during, with the fixed budget, up to {beside(FIXED_BUDGET):.0f} ms", ("long-prompts",),
        ),
        Aim(
            "the same by vLLM, where it is installed, with its default budget",
            f"if its kernels were ours: {alone}; during, with a budget of {VLLM_BUDGET:,}, up to "
            f"{beside(VLLM_BUDGET):.0f} ms",
            ("vllm",),
        ),
        Aim(
            f"{large.label}, throughput against tokens per step, {s.token_counts[0]} to {s.token_counts[-1]:,}, in "
            f"{_listed(s.groups)} sequences",
            _BELOW, ("curve",),
        ),
        Aim("attention of one layer, against torch's kernels", _BELOW, ("attention",)),
        Aim(
            f"mixture of experts ({mixture.label} of 48): decode steps of 1 and {s.batch} sequences, prefill of "
            f"{s.prefill:,} tokens",
            f"{ms(mixture, one):.1f} and {ms(mixture, many):.1f} ms; prefill {ms(mixture, prompt):.0f} ms",
            ("mixture",), f"{_floor(mixture, one, unit='')} and {_floor(mixture, many)}",
        ),
        Aim(
            "time and memory of capturing the CUDA graphs",
            f"{large.label}: {capture:.1f} s; {graph_bytes / 1e9:.1f} GB for what the largest one computes, and no "
            "figure for the graphs themselves",
            ("decode",),
        ),
        Aim(
            "steps from CUDA graphs against steps launched one by one",
            f"decodes: {large.label} {ms(large, one):.1f} against {eager(large):.1f} ms, {small.label} "
            f"{ms(small, one):.2f} against {eager(small):.1f} ms; prefills the same",
            ("decode", "prefill"),
        ),
        Aim(
            "the peaks: bandwidth of a copy, rate of a product",
            f"{gpu.achieved / 1e12:.1f} TB/s, {PRODUCTS / 1e12:.0f} TFLOP/s", ("peaks",),
        ),
        Aim(
            "the same decode and prefill steps by transformers (SDPA, static cache)",
            f"{large.label}: {theirs(one):.1f} ms, and {theirs(prompt):.0f} ms", ("transformers",),
        ),
    ]  # fmt: skip


def table(sizes: Sizes) -> list[str]:
    """Return the table of the page, without measurements."""
    return [
        "| quantity, bfloat16 | floor | predicted | at least | aim | measured | section (`--only`) |",
        "|---|---:|---:|---:|---:|---|---|",
        *(
            f"| {' | '.join([a.quantity, a.floor, a.predicted, a.least, a.aim])} | not measured yet | "
            f"{', '.join(f'`{section}`' for section in a.sections)} |"
            for a in aims(sizes)
        ),
    ]


def _floor(size: ModelSize, shape: _Shape, unit: str = " ms") -> str:
    """Return the time of the step's bytes or operations at the data sheet's rates, with three digits."""
    work: Work = step_work(size.architecture, shape)
    return f"{work.floor_seconds(*DATA_SHEETS[_NAME]) * 1e3:#.3g}{unit}"


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
