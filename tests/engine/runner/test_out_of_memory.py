"""Runners whose model runs out of memory now and then: the state of their rows stays right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.core import chunking
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.runner.gpu_runner import GPURunner
from fastgen.runner.interface import Runner
from fastgen.runner.loader import load_runner
from fastgen.settings import EngineConfig
from support.tiny_models import VOCABULARY, saved

CONFIG = EngineConfig(
    model="", block_size=16, max_model_length=160, kv_cache_memory=4 << 20, token_budget=32, max_sequences=8
)


class ShortOfMemory:
    """A model that runs out of memory before or after it computed something, in steps of more than one token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rng = random.Random(1)
        self._num_tokens = 0
        self.num_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *inputs: Any) -> torch.Tensor:
        self._num_tokens = len(inputs[0].token_ids)
        self._allocate()
        hidden: torch.Tensor = self._model.forward(*inputs)
        self._allocate()
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self._allocate()
        logits: torch.Tensor = self._model.head(hidden)
        return logits

    def _allocate(self) -> None:
        if self._num_tokens > 1 and self._rng.random() < 0.05:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def make_runner(folder: Path, path: str) -> Any:
    source = ModelSource.open(str(folder))
    if path == "cpu":
        return load_runner(source, CONFIG, lambda _stage, _fraction: None)
    cpu = torch.device("cpu")
    model = load_on_gpu(source, cpu, torch.float32, max_model_length=160, progress=lambda _fraction: None)
    return GPURunner(model, KVCache(model.kv_shape, 64, 16), max_model_length=160, max_sequences=8)


def tokens_of(runner: Runner) -> dict[str, list[int]]:
    rng = random.Random(2)
    engine = Engine(runner, CONFIG)
    tokens: dict[str, list[int]] = {}
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0, "prompt_logprobs": 1},
    )
    for number in range(16):
        if number % 3 != 2:  # a third repeat the prompt before
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 60))]
        sampling = SamplingParams(seed=number, max_tokens=12, ignore_eos=True, **kinds[number % len(kinds)])
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine._scheduler.pool.num_free == runner.num_blocks
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("path", ["cpu", "gpu"])
def test_running_out_of_memory_changes_no_token(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "STEPS_PER_GROWTH", 2)
    folder = saved("llama", tmp_path)
    expected = tokens_of(make_runner(folder, path))
    runner = make_runner(folder, path)
    runner._model = short = ShortOfMemory(runner._model)
    assert tokens_of(runner) == expected
    assert short.num_failures > 5
