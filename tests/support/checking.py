"""Invariants after every step and at the end of every workload, for any settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from fastgen.engine.core import Engine
from support.simulation import SimulatedRunner, make_engine, solo, solo_prompt_logprobs
from support.workloads import Arrival, Outcome, Step, Workload, play, random_workload


def check_step(engine: Engine, step: Step, token_budget: int) -> None:
    scheduler = engine._scheduler
    plan = step.plan
    scheduled = {chunk.sequence.id: chunk for chunk in plan.chunks}
    preempted = {sequence.id for sequence in plan.preempted}
    rank = {sequence.id: sequence.rank for sequence in (*(c.sequence for c in plan.chunks), *plan.preempted)}
    rank |= {sequence.id: sequence.rank for sequence in (*scheduler.running, *scheduler.waiting)}
    assert plan.num_tokens <= token_budget, "the budget was exceeded"
    assert len(scheduled) == len(plan.chunks), "a sequence is scheduled twice"
    for request_id in step.decoding:
        assert request_id in scheduled or request_id in preempted, "a decode was left out"
        if request_id in scheduled:
            assert scheduled[request_id].num_tokens == 1
    admitted = [request_id for request_id in step.waiting if request_id in scheduled]
    assert not (preempted and admitted), "a sequence was admitted in a step that preempted another"
    by_rank = sorted(step.waiting, key=rank.__getitem__)
    left = [request_id for request_id in by_rank if request_id not in admitted]
    prefilling = [request_id for request_id in step.running if request_id not in step.decoding]
    if admitted and left:
        assert rank[max(admitted, key=rank.__getitem__)][0] <= rank[left[0]][0], "a lower priority overtook the queue"
        first = min((*prefilling, *step.waiting), key=rank.__getitem__)
        assert first not in left, "the first prompt was overtaken"
    if step.running:
        first = step.running[0]
        higher = [request_id for request_id in admitted if rank[request_id] < rank[first]]
        assert first in scheduled or higher, "the highest-ranked running request did not advance"
    else:
        assert step.waiting[0] in scheduled, "the first waiting request was not admitted"
    if preempted:
        assert set(step.running[-len(preempted) :]) == preempted, "not the lowest-ranked were preempted"
    multi = [chunk.num_tokens > 1 for chunk in plan.chunks]
    assert multi == sorted(multi), "single tokens come first"
    assert not (plan.swap_in and plan.swap_out)


def expected_output(arrival: Arrival, number: int, window: int | None = None) -> list[int]:
    """Return the request's output when it runs alone with unlimited memory."""
    generated: list[int] = []
    for token in solo(arrival.request(number), window):
        generated.append(token)
        if len(generated) == arrival.generate or (token == 0 and not arrival.ignore_eos):
            return generated
    raise AssertionError


def check_outcome(outcome: Outcome, arrivals: tuple[Arrival, ...] | list[Arrival], engine: Engine) -> None:
    pool = engine._scheduler.pool
    window = None if pool.window is None else pool.window.window
    for number, arrival in enumerate(arrivals):
        request_id = str(number)
        expected, got = expected_output(arrival, number, window), outcome.outputs[request_id]
        reason = outcome.finished.get(request_id)
        if request_id in outcome.cancelled:
            assert reason is None
        if request_id in outcome.cancelled or reason == "deadline":
            assert got == expected[: len(got)]
        else:
            assert got == expected, "batching, chunking, sharing or preemption changed the output"
            assert reason == ("stop" if expected[-1] == 0 and not arrival.ignore_eos else "length")
        if arrival.prompt_logprobs and got:
            assert outcome.prompt_logprobs[request_id] == solo_prompt_logprobs(arrival.request(number), window)
            assert outcome.cached_tokens[request_id] == 0
    assert pool.num_free == pool.num_blocks
    assert pool.window is None or pool.window.num_free == pool.window.num_blocks
    assert not engine.has_work
    engine._scheduler.check_integrity()


def check_recomputed_workloads(
    make: Callable[[random.Random, Workload], SimulatedRunner], seeds: Iterable[int], block_size: int
) -> list[Outcome]:
    """Play random workloads whose preempted sequences are recomputed, check each step and outcome, and return these.

    Args:
        make: returns the runner of a workload.
        seeds: one of each workload.
        block_size: of the runners.
    """
    outcomes = []
    for seed in seeds:
        rng = random.Random(seed)
        workload = random_workload(rng, block_size=block_size)
        budget, settings = workload.token_budget, workload.settings | {"preemption": "recompute"}
        engine = make_engine(make(rng, workload), token_budget=budget, max_sequences=workload.max_sequences, **settings)
        outcome = play(engine, workload.arrivals, partial(check_step, token_budget=budget))
        check_outcome(outcome, workload.arrivals, engine)
        outcomes.append(outcome)
    return outcomes
