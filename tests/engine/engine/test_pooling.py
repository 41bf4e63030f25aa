"""Prompts are pooled once, whatever happens to them, on simulated devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.engine.test_out_of_memory import ShortOfMemory
from fastgen.core.request import FinishReason, Pooling, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine
from fastgen.link.messages import TokenOutput
from fastgen.model.step_input import StepInput
from support.simulation import SimulatedRunner, make_engine, solo, solo_pooled

BLOCK = 4
POOLINGS = [Pooling(method="last"), Pooling(method="mean"), Pooling(method="logprobs", token_ids=(3, 7))]


def requests(rng: random.Random) -> list[Request]:
    """Return prompts to pool and to continue, some with a common prefix, some equal."""
    prefix = [rng.randrange(1, 1000) for _ in range(40)]
    made: list[Request] = []
    for number in range(rng.randint(4, 16)):
        if made and rng.random() < 0.25:
            made.append(replace(rng.choice(made), id=str(number)))
            continue
        length = rng.choice((1, BLOCK, rng.randint(1, 12), rng.randint(1, 90)))
        tokens = prefix[: rng.choice((0, length))] + [rng.randrange(1, 1000) for _ in range(length)]
        pooling = rng.choice([None, *POOLINGS])
        made.append(
            Request(
                id=str(number),
                prompt_token_ids=tokens[:length],
                sampling=SamplingParams(max_tokens=rng.randint(1, 25), temperature=0, ignore_eos=True, seed=0),
                priority=rng.choice((0, 0, -1, 1)),
                pooling=pooling,
            )
        )
    return made


def run(engine: Engine, asked: list[Request], rng: random.Random) -> tuple[dict[str, list[TokenOutput]], int]:
    """Add the requests at random steps; return their outputs and the number of preemptions."""
    todo = list(asked)
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in asked}
    preemptions = 0
    while todo or engine.has_work:
        while todo and (not engine.has_work or rng.random() < 0.5):
            engine.add(todo.pop(0))
        report = engine.step()
        engine.check_integrity()
        preemptions += report.step.preemptions
        for output in report.outputs:
            outputs[output.request_id].append(output)
    return outputs, preemptions


def check(asked: list[Request], outputs: dict[str, list[TokenOutput]]) -> None:
    for request in asked:
        got = outputs[request.id]
        if request.pooling is None:
            tokens = [token for output in got for token in output.token_ids]
            assert tokens == [token for token, _ in zip(solo(request), tokens, strict=False)]
            assert len(tokens) == request.sampling.max_tokens
            continue
        (output,) = got
        assert output.pooled == solo_pooled(request), request.pooling.method
        assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, [])
        if request.pooling.method == "mean":
            assert output.cached_tokens == 0


def settings(rng: random.Random) -> dict[str, object]:
    max_sequences = rng.randint(1, 8)
    return {
        "max_sequences": max_sequences,
        "token_budget": rng.randint(max_sequences, 60),
        "chunking": rng.choice(("even", "greedy")),
        "preemption": rng.choice(("swap", "recompute")),
        "prefix_caching": rng.random() < 0.8,
    }


def blocks_for(asked: list[Request]) -> int:
    """Return the blocks of the longest request."""
    most = max(len(r.prompt_token_ids) + (r.sampling.max_tokens if r.pooling is None else 0) for r in asked)
    return -(-most // BLOCK)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_any_workload_pools_each_prompt_once(steps_in_flight: int) -> None:
    preempted = 0
    for seed in range(30):
        rng = random.Random(seed)
        asked = requests(rng)
        runner = SimulatedRunner(
            blocks_for(asked) * rng.choice((1, 2)), BLOCK, num_host_blocks=20, steps_in_flight=steps_in_flight
        )
        outputs, preemptions = run(make_engine(runner, **settings(rng)), asked, rng)  # type: ignore[arg-type]
        check(asked, outputs)
        preempted += preemptions
    assert preempted > 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_without_memory_is_not_pooled_twice(steps_in_flight: int) -> None:
    failures = 0
    for seed in range(30):
        rng = random.Random(seed)
        asked = requests(rng)

        def fails(step: StepInput, _where: str, rng: random.Random = rng) -> bool:
            return step.num_tokens > 1 and rng.random() < 0.05

        runner = ShortOfMemory(
            blocks_for(asked) * 2, BLOCK, num_host_blocks=20, steps_in_flight=steps_in_flight, fails=fails
        )
        outputs, _ = run(make_engine(runner, **settings(rng)), asked, rng)  # type: ignore[arg-type]
        check(asked, outputs)
        failures += len(runner.failures)
    assert failures > 0


def test_pooled_and_overdue_prompts_leave_no_blocks_behind() -> None:
    runner = SimulatedRunner(40, BLOCK, steps_in_flight=2)
    engine = make_engine(runner, token_budget=16, max_sequences=4)
    tokens = list(range(1, 91))
    engine.add(Request(id="cancelled", prompt_token_ids=tokens, pooling=POOLINGS[1]))
    engine.add(Request(id="late", prompt_token_ids=tokens, pooling=POOLINGS[0], deadline_seconds=0.05))
    engine.step()
    assert engine.cancel("cancelled")
    ends = []
    while engine.has_work:
        ends += engine.step().outputs
    assert [(end.request_id, end.finish_reason, end.pooled) for end in ends] == [("late", FinishReason.DEADLINE, None)]
    engine.check_integrity()
    assert engine._scheduler.pool.num_free == 40
