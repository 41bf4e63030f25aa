"""Workloads of requests that share prefixes, are cancelled or pass their deadline, over any settings."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastgen.core.blocks.window_pool import WindowGroup, most_held
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_plan import StepPlan
from fastgen.engine.core import Engine
from fastgen.link.messages import StepReport


def random_requests(
    count: int,
    seed: int,
    *,
    longest: int,
    vocabulary: int,
    samplings: Callable[[random.Random, int], list[SamplingParams]],
) -> list[Request]:
    """Return requests with prompts of up to `longest` tokens, each with one of `samplings(generator, number)`.

    A quarter of them repeat another, as those of a request for several choices or of a client that retries do.
    """
    rng = random.Random(seed)
    made: list[Request] = []
    for number in range(count):
        if made and rng.random() < 0.25:
            made.append(replace(rng.choice(made), id=str(number)))
            continue
        sampling = rng.choice(samplings(rng, number))
        prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, longest))]
        made.append(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
    return made


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step `step` and is cancelled `cancel_after` steps later unless it has finished.

    The first `shared` tokens of its prompt are common to its `family`; the others are its own.
    """

    step: int
    prompt: int
    generate: int
    cancel_after: int | None = None
    ignore_eos: bool = True
    priority: int = 0
    deadline: float | None = None
    family: int = 0
    shared: int = 0
    salt: str = ""
    prompt_logprobs: bool = False

    def request(self, number: int, vocabulary: int = 1000) -> Request:
        own = random.Random(f"own {number}")
        family = random.Random(f"family {self.family}")
        tokens = [(family if place < self.shared else own).randrange(1, vocabulary) for place in range(self.prompt)]
        return Request(
            id=str(number),
            prompt_token_ids=tokens,
            sampling=SamplingParams(
                max_tokens=self.generate,
                temperature=0,
                ignore_eos=self.ignore_eos,
                prompt_logprobs=0 if self.prompt_logprobs else None,
                # The simulated device tells requests of different salts apart by their seeds.
                seed=zlib.crc32(self.salt.encode()),
            ),
            priority=self.priority,
            deadline_seconds=self.deadline,
            cache_salt=self.salt,
        )


def repeated(arrival: Arrival, delays: list[int]) -> list[Arrival]:
    """Return an arrival and equal ones, each so many steps later, that nobody cancels.

    Without a delay they are as those of a request for several choices; after a cancellation, as a client's retry.
    """
    equal = replace(arrival, shared=arrival.prompt)
    return [equal, *(replace(equal, step=arrival.step + delay, cancel_after=None) for delay in delays)]


@dataclass(frozen=True)
class Workload:
    """Arrivals and the engine for them; `settings` are fields of EngineConfig besides budget and max sequences."""

    arrivals: tuple[Arrival, ...]
    token_budget: int
    max_sequences: int
    num_blocks: int
    num_host_blocks: int
    settings: dict[str, Any]


def random_workload(rng: random.Random, *, block_size: int, longest_prompt: int = 100, most: int = 20) -> Workload:
    """Return a mixed workload with repeated requests, over a cache that at least holds its longest request."""
    families, prefix_caching = rng.randint(1, 3), rng.random() < 0.8
    arrivals: list[Arrival] = []
    count = rng.randint(1, most)
    while len(arrivals) < count:
        prompt = rng.randint(1, rng.choice((8, longest_prompt // 3, longest_prompt)))
        arrival = Arrival(
            step=rng.randint(0, 40),
            prompt=prompt,
            generate=rng.randint(1, 30),
            cancel_after=rng.randint(0, 25) if rng.random() < 0.2 else None,
            ignore_eos=rng.random() < 0.5,
            priority=rng.choice((0, 0, 0, -1, 1, 7)),
            deadline=rng.uniform(0.01, 3) if rng.random() < 0.15 else None,
            family=rng.randrange(families),
            shared=rng.choice((0, rng.randint(0, prompt), prompt)),
            salt=rng.choice(("", "", "", "tenant")) if prefix_caching else "",
            prompt_logprobs=rng.random() < 0.15,
        )
        if rng.random() < 0.3:
            delays = [
                rng.choice((0, 0, arrival.cancel_after or 1, rng.randint(0, 30))) for _ in range(rng.randint(1, 4))
            ]
            arrivals += repeated(arrival, delays)
        else:
            arrivals.append(arrival)
    least_blocks = max(-(-(a.prompt + a.generate) // block_size) for a in arrivals)
    max_sequences = rng.randint(1, 12)
    host_blocks = rng.choice((0, rng.randint(1, 2 * least_blocks), 1000))
    return Workload(
        arrivals=tuple(arrivals),
        token_budget=rng.randint(max_sequences, max_sequences + 80),
        max_sequences=max_sequences,
        num_blocks=rng.randint(least_blocks, least_blocks * rng.choice((1, 2, 3, 8))),
        num_host_blocks=host_blocks,
        settings={
            "chunking": rng.choice(("even", "greedy")),
            "inter_token_target": rng.choice(("off", "auto", rng.randint(20, 60))),
            "preemption": rng.choice(("auto", "swap") if host_blocks else ("auto", "recompute")),
            "prefix_caching": prefix_caching,
        },
    )


def random_window(rng: random.Random, block_size: int) -> WindowGroup:
    """Return layers with a window of up to 18 tokens, with at least the blocks that a sequence needs."""
    window = rng.choice((1, 3, 4, 5, 6, 8, 18))
    least = most_held(window, block_size)
    return WindowGroup(window, rng.randint(least, least * rng.choice((1, 2, 4, 8))))


@dataclass(frozen=True)
class Step:
    """One step, and the requests that ran, decoded and waited when it was scheduled, by rank.

    `num_held` counts the running ones and those whose last token a step in flight samples.
    """

    plan: StepPlan
    decoding: frozenset[str]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    num_held: int


@dataclass
class Outcome:
    """Results by request id."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[float]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    reports: list[StepReport] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    preemptions: int = 0
    swapped_out: int = 0

    def record(self, report: StepReport) -> None:
        self.reports.append(report)
        self.preemptions += report.step.preemptions
        self.swapped_out += report.step.swapped_out
        for output in report.outputs:
            assert output.request_id not in self.finished, "an output came after the last one"
            self.outputs[output.request_id] += output.token_ids
            if output.prompt_logprobs is not None:
                assert len(self.outputs[output.request_id]) <= 1, "prompt logprobs came after the first token"
                self.prompt_logprobs[output.request_id] += [row.logprob for row in output.prompt_logprobs]
            if output.cached_tokens is not None:
                assert output.request_id not in self.cached_tokens, "cached tokens were reported twice"
                self.cached_tokens[output.request_id] = output.cached_tokens
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason


Observer = Callable[[Engine, Step], None]


class Recorder:
    """Records the steps that an engine schedules, with the requests as they were before."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._scheduler = engine._scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self.schedule  # type: ignore[method-assign]

    def schedule(self) -> StepPlan | None:
        # A step in flight samples the last token of the others.
        running = [s for s in self._scheduler.running if len(s.tokens) < s.max_length]
        decoding = frozenset(s.id for s in running if s.is_decoding)
        before = tuple(s.id for s in running), tuple(s.id for s in self._scheduler.waiting)
        num_held = len(self._scheduler.running)
        plan = self._schedule()
        if plan is not None:
            self.steps.append(Step(plan, decoding, *before, num_held))
        return plan


def play(
    engine: Engine,
    arrivals: tuple[Arrival, ...] | list[Arrival],
    observe: Observer,
    *,
    vocabulary: int = 1000,
    max_steps: int = 100_000,
) -> Outcome:
    """Run `arrivals` to their end and call `observe` for every step that was scheduled."""
    recorder = Recorder(engine)
    outcome = Outcome()
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
    cancels: dict[int, list[str]] = {}
    step = 0
    while todo or engine.has_work:
        assert step < max_steps, "the workload does not end"
        while todo and (todo[0][1].step <= step or not engine.has_work):
            number, arrival = todo.pop(0)
            engine.add(arrival.request(number, vocabulary))
            outcome.outputs[str(number)] = []
            outcome.prompt_logprobs[str(number)] = []
            if arrival.cancel_after is not None:
                cancels.setdefault(step + arrival.cancel_after, []).append(str(number))
        for request_id in cancels.pop(step, []):
            if engine.cancel(request_id):
                outcome.cancelled.add(request_id)
        step += 1
        if not engine.has_work:
            continue
        num_before = len(recorder.steps)
        outcome.record(engine.step())
        engine._scheduler.check_integrity()  # among others, blocks are conserved and their references counted
        for scheduled in recorder.steps[num_before:]:
            observe(engine, scheduled)
    outcome.steps = recorder.steps
    return outcome
