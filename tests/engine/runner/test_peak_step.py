"""The step whose memory is measured before the rest of a GPU's memory becomes KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen.config import EngineConfig
from fastgen.core.request import MOST_LOGPROBS
from fastgen.kv_cache.sizing import KVShape
from fastgen.model.step_input import StepInput
from fastgen.runner.device import run_peak_step


class Recorder:
    """A runner that keeps the steps it was given."""

    graphs = SimpleNamespace(num_bytes=123)

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.sampled = False

    def launch(self, step: StepInput) -> Any:
        self.steps.append(step)
        return self

    def sample(self, masks: list[Any]) -> None:
        self.sampled = masks == []

    def result(self) -> None:
        assert self.sampled


@pytest.mark.parametrize(("budget", "max_sequences"), [(8192, 256), (16, 16), (40, 3)])
def test_the_largest_step_samples_every_sequence_with_all_that_takes_memory(budget: int, max_sequences: int) -> None:
    model = SimpleNamespace(
        architecture=SimpleNamespace(default_length=512),
        kv_shape=KVShape(1, 1, 16, 16),
        device=torch.device("cpu"),
        cache_dtype=torch.float32,
    )
    runner = Recorder()
    config = EngineConfig(model="", token_budget=budget, max_sequences=max_sequences)
    assert run_peak_step(model, config, lambda *_: runner) == 123
    (step,) = runner.steps
    assert step.num_tokens == config.most_tokens == budget
    assert len(step.sampled) == config.sequence_limit == max_sequences
    sampled = [new.sampling for new in step.new_rows if new.row in step.rows[step.sampled]]
    assert len(sampled) == max_sequences
    for sampling in sampled:
        assert sampling.top_p < 1
        assert sampling.presence_penalty
        assert sampling.logprobs == MOST_LOGPROBS
