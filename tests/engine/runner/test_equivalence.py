"""Mixed workloads over a tiny model with random weights: each request's tokens equal those of its solo run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Ticket
from fastgen.runner.loader import load_runner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig
from support.checking import check_step
from support.driving import FewBlocks
from support.simulation import Clock
from support.tiny_models import VOCABULARY, saved
from support.workloads import Arrival, Workload, play, random_workload

pytestmark = pytest.mark.slow  # over five seconds

BLOCK_SIZE = 16
WORKLOADS = 40


@dataclass
class Clocked(FewBlocks):
    """A runner whose steps take a tenth of a second each on its own clock."""

    clock: Clock = field(default_factory=Clock)

    def launch(self, step: StepInput) -> Ticket:
        self.clock.now += 0.1
        return super().launch(step)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = saved("llama", tmp_path_factory.mktemp("equivalence"))
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, max_model_length=160, kv_cache_memory=4 << 20,
        swap_space=4 << 20,
    )  # fmt: skip
    return load_runner(ModelSource.open(str(folder)), config, lambda _stage, _fraction: None)


def engine_of(clocked: Clocked, workload: Workload) -> Engine:
    config = EngineConfig(
        model="", token_budget=workload.token_budget, max_sequences=workload.max_sequences,
        swap_space=clocked.num_host_blocks, **workload.settings,
    )  # fmt: skip
    return Engine(clocked, config, clocked.clock)


def solo(runner: ModelRunner, arrival: Arrival, number: int) -> list[int]:
    """Run the request alone, with one step for its prompt and one per token."""
    engine = Engine(FewBlocks(runner, runner.num_blocks), EngineConfig(model="", prefix_caching=False))
    engine.add(arrival.request(number, VOCABULARY))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    return tokens


def test_every_completed_request_equals_its_solo_run(runner: ModelRunner) -> None:
    seen: Counter[str] = Counter()
    for seed in range(WORKLOADS):
        workload = random_workload(random.Random(seed), block_size=BLOCK_SIZE, longest_prompt=90, most=8)
        assert runner.num_blocks >= workload.num_blocks
        clocked = Clocked(runner, workload.num_blocks, min(workload.num_host_blocks, runner.num_host_blocks))
        outcome = play(
            engine_of(clocked, workload),
            workload.arrivals,
            lambda e, step, budget=workload.token_budget: check_step(e, step, budget),  # type: ignore[misc]
            vocabulary=VOCABULARY,
        )
        for number, arrival in enumerate(workload.arrivals):
            if outcome.finished.get(str(number)) in ("stop", "length"):
                expected = solo(runner, arrival, number)
                assert outcome.outputs[str(number)] == expected, f"workload {seed}, request {number}: {arrival}"
        seen["swapped"] += outcome.swapped_out > 0
        seen["recomputed"] += outcome.preemptions > outcome.swapped_out
        seen["found in the cache"] += sum(outcome.cached_tokens.values()) > 0
    for what in ("swapped", "recomputed", "found in the cache"):
        assert seen[what] >= 3, f"only {seen[what]} of the workloads: {what}"
