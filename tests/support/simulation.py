"""The real engine and scheduler over a step-time model instead of torch.

`SimulatedRunner` keeps a KV cache of token ids: a pass writes its tokens into the slots that the block tables give, and
a sampled token is a checksum of all tokens read back through the table. A block that is shared, lost or written out of
order therefore changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from fastgen.config import EngineConfig
from fastgen.core.output import PassResult, Sampled
from fastgen.core.request import Request, SamplingParams
from fastgen.core.scheduler import Pass
from fastgen.engine import Engine
from fastgen.messages import StepReport

VOCABULARY = 1000


@dataclass(frozen=True)
class SimulatedArchitecture:
    vocab_size: int = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset({0})


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def next_token(tokens: list[int]) -> int:
    """The token that follows `tokens`: any function of all of them will do."""
    return zlib.crc32(repr(tokens).encode()) % VOCABULARY


@dataclass
class SimulatedRunner:
    """A device whose pass takes base + token · tokens + kv_token · resident tokens seconds."""

    num_blocks: int
    block_size: int
    clock: Clock = field(default_factory=Clock)
    base: float = 0.02
    token: float = 0.0006
    kv_token: float = 2e-6
    passes: list[Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.architecture = SimulatedArchitecture()
        self.max_model_length = self.num_blocks * self.block_size
        self._slots: dict[tuple[int, int], int] = {}

    def execute(self, pass_: Pass) -> PassResult:
        self.passes.append(pass_)
        sampled, resident = [], 0
        for chunk in pass_.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            for position in range(chunk.start, end):
                self._slots[self._slot(sequence.block_table, position)] = sequence.tokens[position]
            resident += end
            if chunk.samples:
                read = [self._slots[self._slot(sequence.block_table, position)] for position in range(end)]
                sampled.append(Sampled(next_token(read)))
        self.clock.now += self.base + self.token * pass_.num_tokens + self.kv_token * resident
        return PassResult(sampled)

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size


@dataclass(frozen=True)
class Arrival:
    """A request that comes before step `step`, and is cancelled `cancel_after` steps later unless it has ended."""

    step: int
    prompt: int
    generate: int
    cancel_after: int | None = None
    ignore_eos: bool = True

    def request(self, number: int) -> Request:
        tokens = [(number * 7919 + i) % VOCABULARY for i in range(self.prompt)]
        return Request(
            id=str(number),
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=self.generate, temperature=0, ignore_eos=self.ignore_eos),
        )


@dataclass
class Outcome:
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    reports: list[StepReport] = field(default_factory=list)
    preemptions: int = 0


Observer = Callable[[Engine, "Step"], None]


@dataclass(frozen=True)
class Step:
    """One pass, and what was running, decoding and waiting when it was scheduled."""

    pass_: Pass
    decoding: frozenset[str]
    running: tuple[str, ...]
    waiting: tuple[str, ...]


def make_engine(runner: SimulatedRunner, *, token_budget: int, max_sequences: int) -> Engine:
    config = EngineConfig(model="simulated", token_budget=token_budget, max_sequences=max_sequences)
    return Engine(runner, config, runner.clock)


def simulate(
    engine: Engine, runner: SimulatedRunner, arrivals: list[Arrival], observe: Observer, *, max_steps: int = 100_000
) -> Outcome:
    """Plays `arrivals` to their end, calling `observe` after every pass."""
    scheduler = engine._scheduler
    outcome = Outcome()
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
    cancels: dict[int, list[str]] = {}
    step = 0
    while todo or engine.has_work:
        assert step < max_steps, "the workload does not end"
        while todo and (todo[0][1].step <= step or not engine.has_work):
            number, arrival = todo.pop(0)
            engine.add(arrival.request(number))
            outcome.outputs[str(number)] = []
            if arrival.cancel_after is not None:
                cancels.setdefault(step + arrival.cancel_after, []).append(str(number))
        for request_id in cancels.pop(step, []):
            if engine.cancel(request_id):
                outcome.cancelled.add(request_id)
        step += 1
        if not engine.has_work:
            continue
        decoding = frozenset(s.id for s in scheduler.running if s.is_decoding)
        running = tuple(s.id for s in scheduler.running)
        waiting = tuple(s.id for s in scheduler.waiting)
        report = engine.step()
        outcome.reports.append(report)
        outcome.preemptions += report.stats.preemptions
        for output in report.outputs:
            outcome.outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                outcome.finished[output.request_id] = output.finish_reason
        observe(engine, Step(runner.passes[-1], decoding, running, waiting))
    return outcome
