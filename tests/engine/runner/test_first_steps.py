"""The steps that run before the rest of a GPU's memory becomes KV cache: their memory is measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen.core.sampling_params import MOST_LOGPROBS, SamplingParams
from fastgen.kv_cache.sizing import KVShape
from fastgen.model.step_input import StepInput
from fastgen.runner.device import run_first_steps
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig

VOCABULARY = 100


class Recorder:
    """A runner that keeps the steps it was given."""

    graphs = SimpleNamespace(num_bytes=123)

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.num_sampled = 0

    def prepare_for(self, config: EngineConfig, progress: Callable[[float], None]) -> None:
        """Have all graphs."""

    def launch(self, step: StepInput) -> Any:
        self.steps.append(step)
        return self

    def sample(self, masks: list[Any]) -> None:
        assert len(masks) == len(self.steps[-1].masked)
        for mask in masks:
            assert len(mask) * 32 >= VOCABULARY
            assert (mask == 0xFFFFFFFF).all()
        self.num_sampled += 1

    def result(self) -> None:
        assert self.num_sampled == len(self.steps)


class ScratchRecorder(Recorder, ModelRunner):
    """As a runner of torch's attention, which needs scratch memory."""


def first_steps(
    budget: int, max_sequences: int, runner: Recorder, progress: Callable[[float], None] = lambda _fraction: None
) -> tuple[list[StepInput], int]:
    """Return the steps, and the bytes that the runner takes besides."""
    model = SimpleNamespace(
        architecture=SimpleNamespace(default_length=512, vocab_size=VOCABULARY),
        kv_shape=KVShape(1, 1, 16, 16),
        device=torch.device("cpu"),
        cache_dtype=torch.float32,
    )
    config = EngineConfig(model="", token_budget=budget, max_sequences=max_sequences)
    assert (config.most_tokens, config.sequence_limit) == (budget, max_sequences)
    num_bytes = run_first_steps(model, config, lambda *_: runner, progress)
    return runner.steps, num_bytes


@pytest.mark.parametrize(("budget", "max_sequences"), [(8192, 256), (16, 16), (40, 3)])
def test_the_first_step_samples_every_sequence_with_all_that_takes_memory(budget: int, max_sequences: int) -> None:
    (step, *_), num_bytes = first_steps(budget, max_sequences, Recorder())
    assert num_bytes == 123
    assert step.num_tokens == budget
    assert len(step.sampled) == len(step.masked) == max_sequences
    sampled = [new.sampling for new in step.new_rows if new.row in step.rows[step.sampled]]
    assert len(sampled) == max_sequences
    for sampling in sampled:
        assert sampling.top_p < 1
        assert sampling.presence_penalty
        assert sampling.logprobs == MOST_LOGPROBS


def test_smaller_steps_follow_with_no_feature_at_all() -> None:
    (_, *smaller), _ = first_steps(40, 3, Recorder())
    assert [step.num_tokens for step in smaller] == [1, 2, 4, 8, 16, 32]
    for step in smaller:
        (new,) = step.new_rows
        assert len(step.sampled) == 1
        assert len(step.masked) == 0
        assert new.sampling == SamplingParams(temperature=0)


def test_the_progress_of_the_steps_is_reported() -> None:
    heard: list[float] = []
    (_, *smaller), _ = first_steps(40, 3, Recorder(), heard.append)
    assert heard == [number / (1 + len(smaller)) for number in range(2 + len(smaller))]


def test_only_torch_attention_is_given_scratch_memory_for_the_longest_context() -> None:
    _, of_kernels = first_steps(40, 3, Recorder())
    _, of_torch = first_steps(40, 3, ScratchRecorder())
    assert of_kernels == Recorder.graphs.num_bytes
    assert of_torch > 2 * 512 * KVShape(1, 1, 16, 16).block_bytes(1)
