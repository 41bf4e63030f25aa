"""Predicted time of a step, so that the first measurement on a GPU confirms or refutes something.

A product takes the time of its weights' bytes at a share of the achieved bandwidth that grows with its size, or that of
its operations, whichever is longer, and a launch. Attention takes the time of its keys and values, or of its
operations. The smaller kernels take at least a launch each. The shares are judgement, from published measurements of
such kernels; nothing here was measured on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.gpu.counts import attention_work
from benchmarks.gpu.sizes import ModelSize, Sizes
from fastgen.core.budget_tuning import TunedBudget, measured_sizes, tune_budget
from fastgen.core.chunking import MIN_PROMPT_TOKENS
from fastgen.core.step_times import StepTime, StepWork
from fastgen.model.config.architecture import Experts, ModelArchitecture
from fastgen.runner.gpu_runner import SPARE_ROWS
from fastgen.runner.graphs import token_counts
from fastgen.settings import EngineConfig

_SIZE = 2  # bytes of bfloat16
# Share of the achieved bandwidth by the most MB of weights of a product. It is lower for experts.
_SHARES: Final = ((40, 0.70), (60, 0.78), (150, 0.86), (float("inf"), 0.92))
_GATE_UP_SHARE, _DOWN_SHARE = 0.78, 0.68
_ATTENTION_SHARE = 0.75
_PRODUCT_LAUNCH, _KERNEL_LAUNCH, _GAP = 0.8e-6, 2.3e-6, 2e-6
_SMALL_KERNELS, _MIXTURE_KERNELS = 5, 8
_LEAST_ATTENTION, _MERGE = 3e-6, 1.5e-6
# Six kernels in a graph of their own, one of which finds the top tokens of a row; bytes of each logit, read once.
_SAMPLER, _SAMPLER_BYTES = 6 * _KERNEL_LAUNCH + _GAP + 20e-6, 4
# Host time of a launch without a graph: of a Triton kernel through torch's dispatcher, and of an operation of torch's,
# of which a layer of transformers takes so many.
_TRITON_DISPATCH, _TORCH_DISPATCH, _TRANSFORMERS_OPERATIONS = 40e-6, 8e-6, 36
# Elementwise operations of transformers read and write so many times as much as our kernels.
_UNFUSED = 3
# Decodes of a calibrated step, their length, and the longest of its chunks (`fastgen.engine.calibration`).
_CALIBRATED_DECODES, _CALIBRATED_LENGTH, _CALIBRATED_CHUNK = 4, 257, 512
# Sequences that the benchmark's engines may run.
MOST_SEQUENCES: Final = 256
# A capture synchronises and returns the allocator's memory twice.
_CAPTURE = 10e-3
# Operations per second: of products, of experts, and of attention by the most keys of a sequence.
PRODUCTS, _EXPERTS = 680e12, 350e12
_ATTENTION: Final = ((4096, 250e12), (16384, 320e12), (float("inf"), 340e12))


@dataclass(frozen=True, slots=True)
class GPU:
    """Bytes per second: by the data sheet, that a streaming kernel achieves, and that small operators achieve."""

    peak: float
    achieved: float
    operators: float


# By name.
GPUS: Final = {"H100 SXM": GPU(3.35e12, 3.0e12, 2.8e12), "H200 SXM": GPU(4.8e12, 4.3e12, 4.0e12)}


def predicted_seconds(gpu: GPU, architecture: ModelArchitecture, sequences: Sequence[tuple[int, int]]) -> float:
    """Return the time of a step in bfloat16, replayed from a CUDA graph.

    Args:
        gpu: the rates.
        architecture: of the model.
        sequences: tokens of each sequence in the step, and its length after it.
    """
    a = architecture
    rows, sampled = sum(count for count, _ in sequences), len(sequences)
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    # Elements that the smaller kernels read and write for each row of a layer.
    norms, rotary, gate = 8 * a.hidden_size, 2 * queries + 4 * keys, 3 * a.mlp_size
    seconds = 0.0
    for layer in a.layers:
        seconds += _product(gpu, rows, a.hidden_size, queries + 2 * keys) + _product(gpu, rows, queries, a.hidden_size)
        seconds += predicted_attention_seconds(gpu, a, sequences)
        kernels, gated = (_SMALL_KERNELS, gate) if layer.experts is None else (_MIXTURE_KERNELS, 0)
        moved = rows * (norms + rotary + gated) * _SIZE / gpu.operators
        seconds += max(kernels * _KERNEL_LAUNCH, moved)
        if layer.experts is None:
            seconds += _product(gpu, rows, a.hidden_size, 2 * a.mlp_size) + _product(
                gpu, rows, a.mlp_size, a.hidden_size
            )
        else:
            seconds += _mixture(gpu, rows, a.hidden_size, layer.experts)
    head = _product(gpu, sampled, a.hidden_size, a.vocab_size)
    return seconds + head + _SAMPLER + _SAMPLER_BYTES * a.vocab_size * sampled / gpu.achieved


def predicted_attention_seconds(
    gpu: GPU, architecture: ModelArchitecture, sequences: Sequence[tuple[int, int]]
) -> float:
    """Return the time of one layer's attention; arguments as in `predicted_seconds`."""
    work = attention_work(architecture, sequences)
    longest = max(length for _, length in sequences)
    rate = next(rate for most, rate in _ATTENTION if longest <= most)
    bound = max(work.cache / (_ATTENTION_SHARE * gpu.peak), _LEAST_ATTENTION)
    if any(count > 1 for count, _ in sequences):
        bound = max(bound, work.operations / rate)
    return bound + _MERGE


def predicted_eager_seconds(gpu: GPU, architecture: ModelArchitecture, sequences: Sequence[tuple[int, int]]) -> float:
    """Return the time of a step whose kernels are launched one by one: the host's or the GPU's, whichever is longer."""
    a = architecture
    kernels = sum(_SMALL_KERNELS + 1 if layer.experts is None else _MIXTURE_KERNELS + 1 for layer in a.layers)
    host = kernels * _TRITON_DISPATCH + 4 * a.num_layers * _TORCH_DISPATCH + 6 * _TRITON_DISPATCH
    return max(host, predicted_seconds(gpu, a, sequences))


def predicted_capture_seconds(gpu: GPU, architecture: ModelArchitecture, token_counts: Sequence[int]) -> float:
    """Return the time to capture graphs: each is launched once to warm up, and once into the graph."""
    launched = [predicted_eager_seconds(gpu, architecture, [(count, count)]) for count in token_counts]
    into_graph = predicted_eager_seconds(gpu, architecture, [(1, 1)])
    return sum(launched) + len(token_counts) * (into_graph + _CAPTURE)


def predicted_transformers_seconds(
    gpu: GPU, architecture: ModelArchitecture, sequences: Sequence[tuple[int, int]]
) -> float:
    """Return the time of a step by transformers: its products are the same, and smaller operations are not fused."""
    a, rows = architecture, sum(count for count, _ in sequences)
    host = a.num_layers * _TRANSFORMERS_OPERATIONS * _TORCH_DISPATCH
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    fused = rows * (8 * a.hidden_size + 2 * queries + 4 * keys + 3 * a.mlp_size) * _SIZE / gpu.operators
    return max(host, predicted_seconds(gpu, a, sequences) + (_UNFUSED - 1) * a.num_layers * fused)


def predicted_requests_rate(gpu: GPU, size: ModelSize, sizes: Sizes) -> float:
    """Return the generated tokens per second of requests that arrive at once: their prompts first, then all decode."""
    draw, a = random.Random(0), size.architecture
    lengths = [[draw.randint(sizes.shortest, sizes.longest) for _ in range(2)] for _ in range(sizes.requests)]
    seconds = sum(predicted_seconds(gpu, a, [(prompt, prompt)] * 8) / 8 for prompt, _ in lengths)
    for step in range(sizes.longest):
        if running := [(1, prompt + step) for prompt, generation in lengths if generation > step]:
            seconds += predicted_seconds(gpu, a, running)
    return sum(generation for _, generation in lengths) / seconds


def predicted_graph_bytes(architecture: ModelArchitecture, num_tokens: int) -> int:
    """Return what the largest graph has in memory at once: the widest activations, and the logits of its rows."""
    a = architecture
    return num_tokens * 2 * a.mlp_size * _SIZE + min(num_tokens, MOST_SEQUENCES + SPARE_ROWS) * a.vocab_size * 4


def predicted_tail(gpu: GPU, architecture: ModelArchitecture, sizes: Sizes) -> TunedBudget:
    """Return the token budget that calibration would choose, and the time of a full step under the clients' load.

    In the long run a step has the clients' prompt and generated tokens in their proportion.
    """
    s, decodes = sizes, [(1, _CALIBRATED_LENGTH)] * _CALIBRATED_DECODES
    config = EngineConfig(model="", device="cuda", max_sequences=MOST_SEQUENCES)

    def measured(tokens: int) -> StepTime:
        chunks = [min(_CALIBRATED_CHUNK, left) for left in range(tokens - len(decodes), 0, -_CALIBRATED_CHUNK)]
        shape = [*decodes, *((chunk, chunk) for chunk in chunks)]
        return StepTime(StepWork(tokens), predicted_seconds(gpu, architecture, shape))

    curve = [measured(tokens) for tokens in measured_sizes(config.most_tokens)]
    minimum = MOST_SEQUENCES + MIN_PROMPT_TOKENS
    tuned = tune_budget(curve, target_seconds=None, minimum=minimum, maximum=config.most_tokens)
    running = min(s.clients, round(tuned.token_budget / (1 + s.prompt / s.generation)))
    prompt = tuned.token_budget - running
    shape = [*[(1, s.prompt + s.generation // 2)] * running, (prompt, s.prompt // 2)]
    return replace(tuned, seconds=predicted_seconds(gpu, architecture, shape))


def _product(gpu: GPU, rows: int, inputs: int, outputs: int) -> float:
    num_bytes = inputs * outputs * _SIZE
    share = next(share for most, share in _SHARES if num_bytes < most * 1e6)
    return max(num_bytes / (share * gpu.achieved), 2 * rows * inputs * outputs / PRODUCTS) + _PRODUCT_LAUNCH


def _mixture(gpu: GPU, rows: int, hidden: int, experts: Experts) -> float:
    """Return the time of routing and experts: those that have a token are read, on average."""
    width = experts.intermediate_size
    busy = experts.count * (1 - (1 - experts.top_k / experts.count) ** rows)
    one = hidden * width * _SIZE
    read = busy * one * (2 / _GATE_UP_SHARE + 1 / _DOWN_SHARE) / gpu.achieved
    computed = 6 * rows * experts.top_k * hidden * width / _EXPERTS
    return _product(gpu, rows, hidden, experts.count) + max(read, computed) + 2 * _PRODUCT_LAUNCH + 2 * _GAP


def table(sizes: Sizes) -> list[str]:
    """Return the predictions of what is measured besides single steps and attention, as a Markdown table."""
    return [
        f"| quantity, bfloat16 | {' | '.join(GPUS)} |",
        "|---" + "|---:" * len(GPUS) + "|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in _rows(sizes)),
    ]


def _rows(sizes: Sizes) -> Iterator[tuple[str, list[str]]]:
    s, large = sizes, sizes.large
    for tokens in s.token_counts:
        shapes = [
            [(tokens // group, s.group_context + tokens // group)] * group for group in s.groups if group <= tokens
        ]
        groups = ", ".join(str(len(shape)) for shape in shapes)
        name = f"{large.label}, step of {tokens} tokens in {groups} sequences: tokens/s"
        times = [[predicted_seconds(gpu, large.architecture, shape) for shape in shapes] for gpu in GPUS.values()]
        yield name, [", ".join(f"{tokens / seconds:,.0f}" for seconds in each) for each in times]
    for label, shape in (
        (f"{s.batch} decodes at {s.batch_context} tokens", [(1, s.batch_context)] * s.batch),
        (f"decode at {s.long_context} tokens", [(1, s.long_context)]),
        (f"prefill of {s.prefill} tokens", [(s.prefill, s.prefill)]),
    ):
        seconds = [predicted_attention_seconds(gpu, large.architecture, shape) for gpu in GPUS.values()]
        yield f"{large.label}, attention of one layer, {label}: ms", [f"{each * 1e3:.3f}" for each in seconds]
    counts = token_counts(EngineConfig(model="", device="cuda"))
    decode, prefill = [(1, s.decode_context)], [(s.prefill, s.prefill)]
    for label, model, predicted in (
        ("decode launched one by one", large, predicted_eager_seconds),
        ("decode launched one by one", s.small, predicted_eager_seconds),
        ("decode by transformers", large, predicted_transformers_seconds),
    ):
        seconds = [predicted(gpu, model.architecture, decode) for gpu in GPUS.values()]
        yield f"{model.label}, {label}: ms", [f"{each * 1e3:.1f}" for each in seconds]
    seconds = [predicted_transformers_seconds(gpu, large.architecture, prefill) for gpu in GPUS.values()]
    yield f"{large.label}, prefill by transformers: ms", [f"{each * 1e3:.1f}" for each in seconds]
    seconds = [predicted_seconds(gpu, s.mixture.architecture, prefill) for gpu in GPUS.values()]
    yield f"{s.mixture.label}, prefill of {s.prefill} tokens: ms", [f"{each * 1e3:.1f}" for each in seconds]
    seconds = [predicted_capture_seconds(gpu, large.architecture, counts) for gpu in GPUS.values()]
    yield f"{large.label}, capture of {len(counts)} graphs: s", [f"{each:.1f}" for each in seconds]
    name = f"{s.small.label}, {s.requests} requests, {s.shortest} to {s.longest} tokens in and out: output tok/s"
    yield name, [f"{predicted_requests_rate(gpu, s.small, s):,.0f}" for gpu in GPUS.values()]
    decodes = [(1, s.decode_context)] * s.streams
    chunk = (s.token_counts[-3] - s.streams, s.long_prompt)
    for label, shape in (
        (f"{s.streams} decodes", decodes),
        (f"{s.streams} decodes beside the last {chunk[0]} of {chunk[1]} prompt tokens", [*decodes, chunk]),
    ):
        seconds = [predicted_seconds(gpu, s.longest_model.architecture, shape) for gpu in GPUS.values()]
        yield f"{s.longest_model.label}, {label}: ms", [f"{each * 1e3:.2f}" for each in seconds]
