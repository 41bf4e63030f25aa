"""What is measured, in sections that do not depend on each other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import vllm_engine
from benchmarks.gpu.aims import FIXED_BUDGET
from benchmarks.gpu.counts import Work, attention_work, step_work
from benchmarks.gpu.models import Ours, graph_capture, static_cache, transformers_model
from benchmarks.gpu.prediction import MOST_SEQUENCES
from benchmarks.gpu.results import Row
from benchmarks.gpu.sizes import ModelSize, Sizes
from benchmarks.gpu.steps import Steps, random_tokens
from benchmarks.gpu.timing import call_seconds, device_seconds
from fastgen.bench.in_process import run_in_process
from fastgen.bench.results import percentile
from fastgen.bench.workload import Workload
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine
from fastgen.kernels.gpu.attention import paged_attention
from fastgen.kernels.gpu.attention_tiles import workspace_elements
from fastgen.kernels.gpu.work_list import list_attention_work
from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.device_input import DeviceRows

# Layers whose attention is timed together, so that no cache of the chip holds their keys and values.
_ATTENTION_LAYERS = 8
# Steps or calls of transformers that are timed at most: its static cache grows with each.
_THEIR_CALLS = 60


@dataclass(frozen=True, slots=True)
class Bench:
    """Where, how large and whether with CUDA graphs to measure."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    graphs: bool = True

    def ours(self, size: ModelSize) -> Ours:
        """Return our model, with its graphs."""
        ours = Ours.make(size, self.sizes.block_size, MOST_SEQUENCES, self.device, self.dtype)
        capture = graph_capture(self.device)
        if self.graphs and capture is not None:
            ours.capture_graphs(max(self.sizes.token_counts), capture)
        return ours

    @property
    def replayed(self) -> str:
        """How `device_seconds` runs a call."""
        return "replayed from a CUDA graph" if self.device.type == "cuda" else ""

    def work(self, size: ModelSize, sequences: Sequence[tuple[int, int]]) -> Work:
        """Count a step of the model."""
        return step_work(size.architecture, sequences, element_bytes=self.dtype.itemsize)


def peaks(bench: Bench) -> Iterator[Row]:
    """Measure the peaks of the memory and of the arithmetic."""
    size, n = bench.sizes.peak_bytes, bench.sizes.peak_matrix
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    seconds = device_seconds(lambda: target.copy_(source), bench.device, bench.sizes.seconds)
    yield Row(f"peak: copy of {size >> 20} MiB", seconds, work=Work(activations=2 * size))
    a, b = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    seconds = device_seconds(lambda: a @ b, bench.device, bench.sizes.seconds)
    work = Work(activations=3 * n * n * bench.dtype.itemsize, operations=2 * n**3)
    yield Row(f"peak: product of {n} x {n}", seconds, work=work)


def decode(bench: Bench, size: ModelSize, batch: int, context: int) -> Iterator[Row]:
    """Time decode steps of the engine, and the forward pass alone."""
    yield from _decode(bench, bench.ours(size), batch, context)


def _decode(bench: Bench, ours: Ours, batch: int, context: int) -> Iterator[Row]:
    size, steps = ours.size, bench.sizes.decode_steps
    engine = ours.engine(max(batch, 16))
    _decode_steps(engine, ours, batch, context, 4)  # compiles the kernels
    times, length = _decode_steps(engine, ours, batch, context, steps)
    shape = [(1, length)] * batch
    name = f"{size.label}, {_decodes(batch)} at {context} tokens"
    work = bench.work(size, shape)
    spread = f"p99 {percentile(times, 0.99) * 1e3:.3f} ms; {length} tokens of context on average"
    yield Row(f"{name}: step of the engine", percentile(times, 0.5), batch, work, spread)
    del engine
    steps_alone = Steps(ours, shape)
    seconds = steps_alone.seconds_ahead(bench.sizes.seconds)
    yield Row(f"{name}: steps without a scheduler", seconds, batch, work, str(ours.runner.graphs or ""))
    if ours.runner.graphs is not None:
        with ours.eager():
            seconds = steps_alone.seconds_ahead(bench.sizes.seconds)
        yield Row(f"{name}: steps without a scheduler, launched one by one", seconds, batch, work)
    yield _forward_alone(bench, ours, shape, name)


def _decode_steps(engine: Engine, ours: Ours, batch: int, context: int, steps: int) -> tuple[list[float], int]:
    """Return the times of steps in which all of `batch` sequences decode and nothing else runs, and their mean length.

    The times are in ascending order.
    """
    # The first sequences also decode while the prompts of the last are computed.
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps + 8 * batch)
    names = [str(number) for number in range(batch)]
    for number, name in enumerate(names):
        prompt = random_tokens(context, ours.runner.vocab_size, number)
        engine.add(Request(id=name, prompt_token_ids=prompt, sampling=sampling))
    times: list[float] = []
    lengths: list[float] = []
    while engine.has_work and len(times) < steps + 1:
        report = engine.step()
        if report.step.decode_tokens == batch and not report.step.prefill_tokens:
            times.append(report.step.step_seconds)
            lengths.append(report.scheduler.kv_tokens / batch)
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    # The first such step overlaps with one that computes a prompt.
    return sorted(times[1:]), round(statistics.fmean(lengths[1:]))


def _forward_alone(bench: Bench, ours: Ours, shape: Sequence[tuple[int, int]], name: str) -> Row:
    """Time the forward pass and the head on the device."""
    rows, size = MOST_SEQUENCES, ours.cache.block_size
    tables = DeviceRows(
        rows, -(-ours.size.max_length // size), torch.zeros(rows, dtype=torch.int32, device=bench.device)
    )
    forward_input = tables.apply(Steps(ours, shape).first)
    seconds = device_seconds(
        lambda: ours.model.head(ours.model.forward(forward_input, ours.cache)), bench.device, bench.sizes.seconds
    )
    tokens = sum(count for count, _ in shape)
    return Row(f"{name}: forward pass alone", seconds, tokens, bench.work(ours.size, shape), bench.replayed)


def prefill(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """Time one prompt alone."""
    yield from _prefill(bench, bench.ours(size))


def _prefill(bench: Bench, ours: Ours) -> Iterator[Row]:
    size, n = ours.size, bench.sizes.prefill
    steps, shape = Steps(ours, [(n, n)]), [(n, n)]
    seconds = call_seconds(steps.run, bench.device, bench.sizes.seconds)
    name = f"{size.label}, prefill of {n} tokens: launch to result"
    yield Row(name, seconds, n, bench.work(size, shape))
    if ours.runner.graphs is not None:
        with ours.eager():
            seconds = call_seconds(steps.run, bench.device, bench.sizes.seconds)
        yield Row(f"{name}, launched one by one", seconds, n, bench.work(size, shape))
    yield _forward_alone(bench, ours, shape, f"{size.label}, prefill of {n} tokens")


def requests(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """Time a load of requests of random lengths that all arrive at once."""
    ours, s = bench.ours(size), bench.sizes
    engine = ours.engine(s.requests)
    _generate(engine, ours, s, max(2, s.requests // 8), seed=1)  # compiles the kernels
    seconds, prompt, generated = _generate(engine, ours, s, s.requests, seed=0)
    name = f"{size.label}, {s.requests} requests, {s.shortest} to {s.longest} tokens in and out: output"
    yield Row(name, seconds, generated, note=f"{(prompt + generated) / seconds:,.0f} tok/s with the prompts")


def _generate(engine: Engine, ours: Ours, sizes: Sizes, count: int, seed: int) -> tuple[float, int, int]:
    """Return seconds, prompt tokens and generated tokens of `count` requests."""
    rng, started = random.Random(seed), time.perf_counter()
    prompts = generated = 0
    for number in range(count):
        length, most = (rng.randint(sizes.shortest, sizes.longest) for _ in range(2))
        prompt = random_tokens(length, ours.runner.vocab_size, number)
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=most)
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
        prompts += length
    while engine.has_work:
        generated += sum(len(output.token_ids) for output in engine.step().outputs)
    return time.perf_counter() - started, prompts, generated


def tail(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """Compare the longest inter-token gaps with the median under a closed loop of long prompts."""
    ours, s = bench.ours(size), bench.sizes
    load = Workload(s.tail_requests, s.clients, s.prompt, s.generation, 0.3, seed=0)
    vocabulary = ours.runner.vocab_size

    def encode(text: str) -> list[int]:
        return [3 + crc32(word.encode()) % (vocabulary - 3) for word in text.split()]

    results = run_in_process(ours.engine(MOST_SEQUENCES), encode, load, ours.size.max_length, lambda: None)
    gaps = sorted(gap for answer in results.answers for gap in answer.gaps)
    name = f"{size.label}, p{s.prompt}/g{s.generation}, {s.clients} clients"
    median, worst = percentile(gaps, 0.5), percentile(gaps, 0.99)
    rate = f"{results.rate(results.generated_tokens):,.0f} output tok/s"
    yield Row(f"{name}: median inter-token latency", median, note=rate)
    yield Row(f"{name}: p99 inter-token latency", worst, note=f"{worst / median:.2f} times the median")


def long_prompts(bench: Bench) -> Iterator[Row]:
    """Time the steps of decodes before long prompts arrive, until these are computed, and after that."""
    s = bench.sizes
    ours = bench.ours(s.longest_model)
    fixed = min(FIXED_BUDGET, 8 * max(s.token_counts))
    for setting, settings in (
        ("with the default target", {}),
        (f"with a budget of {fixed} and no target", {"token_budget": fixed, "inter_token_target": "off"}),
    ):
        engine = ours.engine(max(16, s.streams + s.long_prompts), **settings)
        yield from _phases(f"{_beside_prompts(s)}, {setting}", _steps_around_prompts(engine, ours, s))
        del engine


def vllm(bench: Bench) -> Iterator[Row]:
    """Time the tokens of the same load by vLLM with its default budget; no rows where it is not installed."""
    if vllm_engine.is_installed():
        name = f"vLLM {vllm_engine.version()}, {_beside_prompts(bench.sizes)}"
        yield from _phases(name, vllm_engine.phases_around_prompts(bench.sizes, bench.dtype))


def _beside_prompts(sizes: Sizes) -> str:
    prompts = f"{sizes.long_prompts} prompts of {sizes.long_prompt} tokens"
    return f"{sizes.longest_model.label}, {_decodes(sizes.streams)}, {prompts}"


def _phases(name: str, phases: tuple[list[float], list[float], list[float]]) -> Iterator[Row]:
    """Yield a row for the ascending latencies before, during and after the long prompts."""
    for phase, times in zip(("before", "during", "after"), phases, strict=True):
        spread = f"p99 {percentile(times, 0.99) * 1e3:.3f} ms, longest {times[-1] * 1e3:.3f} ms"
        note = f"{spread}; {len(times) / sum(times):.1f} tok/s each; {len(times)} latencies"
        yield Row(f"{name}: median inter-token latency {phase}", percentile(times, 0.5), note=note)


def _steps_around_prompts(engine: Engine, ours: Ours, sizes: Sizes) -> tuple[list[float], list[float], list[float]]:
    """Return the ascending times of all streams' steps before, during and after the long prompts."""
    room = ours.size.max_length - sizes.decode_context
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=room)
    names = [f"stream {number}" for number in range(sizes.streams)]
    for number, name in enumerate(names):
        prompt = random_tokens(sizes.decode_context, ours.runner.vocab_size, number)
        engine.add(Request(id=name, prompt_token_ids=prompt, sampling=sampling))
    while engine.step().step.decode_tokens < sizes.streams:
        pass
    before = [_step_seconds(engine)[0] for _ in range(sizes.watched_steps)]
    for number in range(sizes.long_prompts):
        prompt = random_tokens(sizes.long_prompt, ours.runner.vocab_size, sizes.streams + number)
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
        names.append(f"prompt {number}")
        engine.add(Request(id=names[-1], prompt_token_ids=prompt, sampling=sampling))
    during, left = list[float](), sizes.long_prompts * sizes.long_prompt
    while left > 0:
        seconds, computed = _step_seconds(engine)
        during.append(seconds)
        left -= computed
    after = [_step_seconds(engine)[0] for _ in range(sizes.watched_steps)]
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    return sorted(before), sorted(during), sorted(after)


def _step_seconds(engine: Engine) -> tuple[float, int]:
    """Run a step; return the time until its results are there, and the prompt tokens that it computed."""
    begin = time.perf_counter()
    report = engine.step()
    return time.perf_counter() - begin, report.step.prefill_tokens


def curve(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """Time steps of growing numbers of tokens, in different numbers of sequences."""
    ours, s = bench.ours(size), bench.sizes
    for tokens in s.token_counts:
        for group in s.groups:
            if tokens < group:
                continue
            count = tokens // group
            shape = [(count, s.group_context + count)] * group
            seconds = Steps(ours, shape).seconds_ahead(s.seconds / 2)
            name = f"{size.label}, step of {tokens} tokens in {group} sequence{'s' * (group > 1)}"
            yield Row(name, seconds, tokens, bench.work(size, shape))


def mixture(bench: Bench) -> Iterator[Row]:
    """Time decodes and a prompt of a mixture of experts."""
    ours, s = bench.ours(bench.sizes.mixture), bench.sizes
    yield from _decode(bench, ours, 1, s.decode_context)
    yield from _decode(bench, ours, s.batch, s.batch_context)
    yield from _prefill(bench, ours)


def attention(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """Time our attention of one layer and torch's own."""
    s = bench.sizes
    for name, shape in (
        (_decodes(s.batch) + f" at {s.batch_context} tokens", [(1, s.batch_context)] * s.batch),
        (f"decode at {s.long_context} tokens", [(1, s.long_context)]),
        (f"prefill of {s.prefill} tokens", [(s.prefill, s.prefill)]),
    ):
        work = attention_work(size.architecture, shape, element_bytes=bench.dtype.itemsize)
        tokens = sum(count for count, _ in shape)
        heading = f"{size.label}, attention of one layer, {name}"
        yield Row(f"{heading}: ours", _our_attention_seconds(bench, size, shape), tokens, work)
        run = _torch_attention(bench, size, shape)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            label = f"{heading}: torch, {backend.name.lower().replace('_', ' ')}"
            try:
                with sdpa_kernel(backend):
                    seconds = device_seconds(run, bench.device, s.seconds) / _ATTENTION_LAYERS
            except RuntimeError as error:  # the kernel does not take these operands
                yield Row(label, note=_first_line(error))
            else:
                yield Row(label, seconds, tokens, work)
        seconds = device_seconds(run, bench.device, s.seconds) / _ATTENTION_LAYERS
        yield Row(f"{heading}: torch, its choice", seconds, tokens, work)


def _our_attention_seconds(bench: Bench, size: ModelSize, shape: Sequence[tuple[int, int]]) -> float:
    a, block_size, device = size.architecture, bench.sizes.block_size, bench.device
    rows = sum(count for count, _ in shape)
    blocks = -(-shape[0][1] // block_size)
    kv = KVShape(_ATTENTION_LAYERS, a.num_kv_heads, a.head_dim, a.head_dim, bench.dtype.itemsize)
    cache = KVCache(kv, blocks * len(shape), block_size, device=device, dtype=bench.dtype)
    cache.keys.normal_()
    cache.values.normal_()
    counts = torch.tensor([0, *(count for count, _ in shape)], device=device)
    lengths = torch.tensor([length for _, length in shape], dtype=torch.int32, device=device)
    tables = torch.randperm(blocks * len(shape), device=device).int().view(len(shape), blocks)
    query = torch.randn(rows, a.num_heads, a.head_dim, device=device, dtype=bench.dtype)
    workspace = torch.zeros(workspace_elements(a.num_kv_heads, a.head_dim, device), device=device)
    out, starts = torch.empty_like(query), counts.cumsum(0).int()

    def run() -> None:
        work = list_attention_work(query, cache.keys[0], starts, lengths)
        for keys, values in zip(cache.keys, cache.values, strict=True):
            paged_attention(out, query, keys, values, starts, lengths, tables, work, workspace, scale=a.attention_scale)

    return device_seconds(run, device, bench.sizes.seconds) / _ATTENTION_LAYERS


def _torch_attention(bench: Bench, size: ModelSize, shape: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Return torch's attention of all layers, for sequences of the same shape."""
    a, (count, length) = size.architecture, shape[0]

    def random_heads(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(len(shape), heads, tokens, a.head_dim, device=bench.device, dtype=bench.dtype)

    query = random_heads(a.num_heads, count)
    caches = [tuple(random_heads(a.num_kv_heads, length) for _ in range(2)) for _ in range(_ATTENTION_LAYERS)]

    def run() -> None:
        for keys, values in caches:
            F.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, enable_gqa=True)

    return run


def transformers(bench: Bench) -> Iterator[Row]:
    """Time transformers' decode steps of both models, and the prefill of the large one."""
    s = bench.sizes
    large = transformers_model(s.large, bench.device, bench.dtype)
    yield _their_prefill(bench, large, s.large)
    decodes = [
        _their_decode(bench, large, s.large, 1, s.decode_context),
        _their_decode(bench, large, s.large, s.batch, s.batch_context),
        _their_decode(bench, transformers_model(s.small, bench.device, bench.dtype), s.small, 1, s.decode_context),
    ]
    for name, batch, work, step in decodes:
        seconds = call_seconds(step, bench.device, s.seconds, most=_THEIR_CALLS)
        yield Row(f"{name}: step", seconds, batch, work, "SDPA, static cache, eager")
    for name, batch, work, step in decodes:
        label = f"{name}: forward pass alone"
        try:
            seconds = device_seconds(step, bench.device, s.seconds, most=_THEIR_CALLS)
        except RuntimeError as error:
            yield Row(label, note=f"no CUDA graph of it: {_first_line(error)}")
        else:
            yield Row(label, seconds, batch, work, bench.replayed)


def _their_decode(
    bench: Bench, model: Any, size: ModelSize, batch: int, context: int
) -> tuple[str, int, Work, Callable[[], object]]:
    """Return name, tokens, work and a function of a decode step."""
    cache = _filled(bench, model, batch, context)
    token = torch.full((batch, 1), 3, device=bench.device)

    def step() -> object:
        return model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    name = f"transformers {size.label}, {_decodes(batch)} at {context} tokens"
    return name, batch, bench.work(size, [(1, context)] * batch), step


def _filled(bench: Bench, model: Any, batch: int, context: int) -> Any:
    """Return a static cache that holds `context` tokens of each sequence and has room for the timed steps."""
    cache = static_cache(model, context + 2 * _THEIR_CALLS + 8)
    tokens = torch.randint(3, model.config.vocab_size, (batch, context), device=bench.device)
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _their_prefill(bench: Bench, model: Any, size: ModelSize) -> Row:
    n = bench.sizes.prefill
    cache = static_cache(model, n)
    tokens = torch.randint(3, model.config.vocab_size, (1, n), device=bench.device)

    def run() -> object:
        cache.reset()
        return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    seconds = call_seconds(run, bench.device, bench.sizes.seconds)
    name = f"transformers {size.label}, prefill of {n} tokens"
    return Row(name, seconds, n, bench.work(size, [(n, n)]), "SDPA, static cache, eager")


def _decodes(batch: int) -> str:
    return f"{batch} decode{'s' * (batch > 1)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


Section = Callable[[Bench], Iterator[Row]]


def _large(measure: Callable[..., Iterator[Row]]) -> Section:
    return lambda bench: measure(bench, bench.sizes.large)


# In this order, by name. `peaks` always runs.
SECTIONS: dict[str, Section] = {
    "peaks": peaks,
    "decode": lambda b: decode(b, b.sizes.large, 1, b.sizes.decode_context),
    "prefill": _large(prefill),
    "batch": lambda b: decode(b, b.sizes.large, b.sizes.batch, b.sizes.batch_context),
    "small-decode": lambda b: decode(b, b.sizes.small, 1, b.sizes.decode_context),
    "requests": lambda b: requests(b, b.sizes.small),
    "tail": _large(tail),
    "long-prompts": long_prompts,
    "vllm": vllm,
    "curve": _large(curve),
    "attention": _large(attention),
    "mixture": mixture,
    "transformers": transformers,
}
