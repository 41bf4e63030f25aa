"""Kernels are compiled at start: a first request that needs another would stall all streams for seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.core.request import FinishReason, Pooling, Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.engine.core import Engine
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers import float8_linear
from fastgen.model.layers.decoder import Decoder
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.runner.device import run_first_steps
from fastgen.runner.gpu_runner import GPURunner
from fastgen.runner.interface import Runner
from fastgen.settings import EngineConfig
from support.given_grammars import Given
from support.kernel_keys import KernelKeys
from support.quantized_models import FORMATS, model_of, save_quantized
from support.simulated_graphs import SimulatedCapture
from support.tiny_models import VOCABULARY, saved
from support.workloads import random_requests

pytestmark = pytest.mark.slow  # over five seconds

# Steps sample up to 18 rows, 16 among them: Triton treats multiples of 16 otherwise.
BLOCK_SIZE, LONGEST, SEQUENCES = 16, 160, 18


@dataclass
class Anything:
    """A grammar that allows every token."""

    end: FinishReason | None = None
    is_pending: bool = False

    def fill_mask(self, mask: memoryview) -> None:
        mask[:] = memoryview(bytes(b"\xff" * mask.nbytes)).cast("I")

    def accept(self, token: int) -> None:
        """Nothing depends on the tokens."""


def samplings(rng: random.Random, number: int) -> list[SamplingParams]:
    """Return sampling parameters that together use every feature."""
    grammar, length = Grammar(kind="json_object"), rng.randint(1, 12)
    return [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=length, grammar=grammar),
        SamplingParams(temperature=0.9, seed=number, max_tokens=length, grammar=grammar, logprobs=2, min_tokens=2),
        SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=length, logprobs=0),
        SamplingParams(temperature=0.8, min_p=0.1, top_k=5, seed=number, max_tokens=length, logprobs=1),
        SamplingParams(temperature=1, typical_p=0.5, seed=number, max_tokens=length, logprobs=16),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=length, logprobs=20),
        SamplingParams(temperature=0, logit_bias=((7, 3.0),), max_tokens=length, prompt_logprobs=0),
        SamplingParams(temperature=0, bad_words=((5,), (6, 7)), max_tokens=length, prompt_logprobs=1),
    ]


def requests(count: int, seed: int) -> list[Request]:
    asked = random_requests(count, seed, longest=90, vocabulary=VOCABULARY, samplings=samplings)
    poolings = (Pooling(method="last"), Pooling(method="mean"), Pooling(method="logprobs", token_ids=(3, 7)))
    pooled = [
        Request(id=pooling.method, prompt_token_ids=list(range(3, 40 + number)), pooling=pooling)
        for number, pooling in enumerate(poolings)
    ]
    return asked + pooled


def endings() -> list[Request]:
    """Return requests that end one after another, so that steps sample any number of rows."""
    lengths = [SamplingParams(temperature=0, max_tokens=2 + number, ignore_eos=True) for number in range(SEQUENCES)]
    return [Request(id=f"end {s.max_tokens}", prompt_token_ids=[3], sampling=s) for s in lengths]


def run(runner: Runner, asked: list[Request], config: EngineConfig, num_alone: int) -> None:
    """Run requests of which the first come one by one, then all others at once."""
    engine = Engine(runner, config, grammars=Given(*(Anything() for _ in asked)))
    for number, request in enumerate(asked):
        engine.add(request)
        while engine.has_work and number < num_alone:
            engine.step()
    while engine.has_work:
        engine.step()


def load(name: str, folder: Path, cache_dtype: torch.dtype | None = None) -> Decoder[DeviceInput]:
    """Load a model of a family, or a Llama whose weights are stored in a format."""
    path = save_quantized(model_of("llama"), FORMATS[name], folder)[0] if name in FORMATS else saved(name, folder)
    return load_on_gpu(
        ModelSource.open(str(path)),
        torch.device("cpu"),
        torch.bfloat16,
        cache_dtype=cache_dtype,
        max_model_length=LONGEST,
        progress=lambda _fraction: None,
    )


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_no_request_needs_a_kernel_that_was_not_compiled_at_start(family: str, graphs: bool, tmp_path: Path) -> None:
    kernels = check(load(family, tmp_path), graphs=graphs)
    assert kernels >= {"paged_attention_kernel", "_process_logits", "_score_rows", "_commit_tokens", "_draw"}


@pytest.mark.parametrize(
    ("stored", "cache_dtype", "kernel"),
    [
        ("pack-quantized", None, "_multiply"),
        ("float-quantized", None, "_quantise_rows"),
        ("llama", torch.float8_e4m3fn, "_rotary_cache"),
    ],
    ids=["int4", "float8", "float8 cache"],
)
def test_neither_do_quantised_weights_and_caches(
    stored: str, cache_dtype: torch.dtype | None, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8_linear, "has_float8_units", lambda _device: True)
    # More sequences than rows that are multiplied with packed weights: the largest step does not multiply so few.
    assert kernel in check(load(stored, tmp_path, cache_dtype), graphs=False, max_sequences=72)


def check(model: Decoder[DeviceInput], *, graphs: bool, max_sequences: int = SEQUENCES) -> set[str]:
    """Start a model, serve all kinds of requests, and return the names of the kernels that were launched."""
    config = EngineConfig(
        model="", token_budget=300, max_sequences=max_sequences, max_model_length=LONGEST, block_size=BLOCK_SIZE,
        swap_space=1, preemption="swap",
    )  # fmt: skip

    def make_runner(model: Any, cache: KVCache, config: EngineConfig, longest: int) -> GPURunner:
        runner = GPURunner(model, cache, max_model_length=longest, max_sequences=config.sequence_limit)
        if graphs:
            runner.capture_graphs([1, 2, 4, 8, 16, 24], SimulatedCapture())
        return runner

    with KernelKeys() as start:
        run_first_steps(model, config, make_runner)
    cache = KVCache(model.kv_shape, 40, BLOCK_SIZE, num_host_blocks=24, dtype=model.cache_dtype)
    runner = make_runner(model, cache, config, LONGEST)
    with KernelKeys() as later:
        run(runner, endings(), config, num_alone=0)
        run(runner, requests(30, seed=1), config, num_alone=8)
    missing = sorted(later.keys - start.keys)
    assert not missing, "\n".join(f"{kernel}: {key}" for kernel, key in missing)
    return {name for name, _ in later.keys}
