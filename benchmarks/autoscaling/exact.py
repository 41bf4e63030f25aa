"""A replica that runs the engine's own step loop and scheduler on a simulated device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.autoscaling.device import Device
from benchmarks.autoscaling.replica import TOLERANCE, Arrival, Engine, ReplicaMetrics, RequestLog
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.stats import SchedulerStats
from fastgen.core.step_output import StepOutput
from fastgen.core.step_times import StepWork
from fastgen.engine.core import Engine as RealEngine
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Mask
from fastgen.settings import EngineConfig

_BLOCK = 64


class _Runner:
    """A runner whose steps take the device's time, one after the other, and always sample the same token."""

    num_host_blocks = 0
    num_state_slots = 0
    window_group = None
    seconds_per_block = 0.0
    block_size = _BLOCK
    vocab_size = 2
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, device: Device, now: float) -> None:
        self._device = device
        self.now = now
        self.steps_in_flight = device.steps_in_flight
        self._busy_until = now
        self.num_blocks = device.kv_tokens // _BLOCK
        self.max_model_length = self.num_blocks * _BLOCK

    def clock(self) -> float:
        return self.now

    def launch(self, step: StepInput) -> _Ticket:
        began = max(self.now, self._busy_until)
        sizes = np.diff(step.query_starts).astype(np.int64)
        pairs = int(((sizes - 1) * (step.seq_lens - sizes)).sum())
        work = StepWork(step.num_tokens, int(step.seq_lens.sum()), pairs)
        self._busy_until = began + self._device.coefficients.seconds(work)
        return _Ticket(self, self._busy_until, len(step.sampled))


@dataclass(frozen=True, slots=True)
class _Ticket:
    runner: _Runner
    done_at: float
    num_sampled: int

    def sample(self, masks: list[Mask]) -> None:
        pass

    def result(self) -> StepOutput:
        self.runner.now = max(self.runner.now, self.done_at)
        return StepOutput([1] * self.num_sampled)


@dataclass(slots=True)
class _Progress:
    arrival: Arrival
    first: float | None = None
    last: float = 0.0
    met: bool = True


class ExactReplica:
    """A real engine: see `benchmarks.autoscaling.replica.Replica`."""

    def __init__(self, engine: Engine, log: RequestLog, now: float) -> None:
        device = engine.device
        config = EngineConfig(
            model="simulated",
            token_budget=device.token_budget,
            max_sequences=device.max_sequences,
            inter_token_target=round(engine.targets.gap * 1000),
            prefix_caching=engine.prefix_cache,
        )
        self._device = device
        self._has_cache = engine.prefix_cache
        self._runner = _Runner(device, now)
        self._engine = RealEngine(self._runner, config, self._runner.clock)
        self._log = log
        self._limit = engine.targets.gap * TOLERANCE
        self._max_queued = engine.max_queued
        self._alive: dict[str, _Progress] = {}
        self._num_added = 0
        self._stats: SchedulerStats = self._engine.report([]).scheduler
        self._steps = 0
        self._step_seconds = 0.0
        self._prefilled = self._decoded = 0
        self._ended = self._ended_prompt = self._ended_generated = self._rejected = 0
        self._arrived_tokens = self._rejected_tokens = self._cached_tokens = 0
        self._just_ended: list[Arrival] = []
        assert engine.patience == float("inf"), "clients that give up are only simulated approximately"

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""
        return len(self._alive)

    @property
    def backlog(self) -> int:
        """Prompt tokens not yet computed."""
        return self._stats.backlog_prompt_tokens

    def add(self, arrival: Arrival) -> None:
        """Queue or reject a request."""
        self._arrived_tokens += arrival.prompt
        if self._stats.num_waiting >= self._max_queued:
            self._log.lose(arrival)
            self._just_ended.append(arrival)
            self._rejected += 1
            self._rejected_tokens += arrival.prompt
            return
        self._runner.now = max(self._runner.now, arrival.time)
        self._num_added += 1
        name = str(self._num_added)
        self._alive[name] = _Progress(arrival)
        sampling = SamplingParams(max_tokens=arrival.generate, temperature=0)
        tokens = _tokens(arrival, self._num_added) if self._has_cache else [0] * arrival.prompt
        self._engine.add(Request(id=name, prompt_token_ids=tokens, sampling=sampling))
        self._stats = self._engine.report([]).scheduler

    def run_until(self, now: float) -> None:
        """Run all steps that start before `now`."""
        while self._runner.now < now:
            if self._engine.has_work:
                self._step()
            else:
                self._runner.now = now

    def drain(self, deadline: float) -> float:
        """Finish all requests or abort them at `deadline`."""
        while self._engine.has_work and self._runner.now < deadline:
            self._step()
        for progress in self._alive.values():
            self._log.lose(progress.arrival)
        return min(self._runner.now, deadline)

    def metrics(self, pod: str, now: float) -> ReplicaMetrics:
        """Return what a scrape returns."""
        stats = self._stats
        return ReplicaMetrics(
            pod=pod,
            time=now,
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_tokens=stats.kv_tokens,
            kv_capacity_tokens=self._device.kv_tokens,
            token_budget=self._device.token_budget,
            max_sequences=self._device.max_sequences,
            backlog_prompt_tokens=stats.backlog_prompt_tokens,
            oldest_waiting_seconds=stats.oldest_waiting_seconds,
            fit=lambda: self._engine.step_model.coefficients,
            scheduled_prefill_tokens=self._prefilled,
            scheduled_decode_tokens=self._decoded,
            steps=self._steps,
            step_seconds=self._step_seconds,
            ended=self._ended,
            ended_prompt_tokens=self._ended_prompt,
            ended_generated_tokens=self._ended_generated,
            rejected=self._rejected,
            arrived_prompt_tokens=self._arrived_tokens,
            rejected_prompt_tokens=self._rejected_tokens,
            cancelled_prompt_tokens=0,
            cached_prompt_tokens=self._cached_tokens,
        )

    def ended(self) -> list[Arrival]:
        """Return the requests that ended since the last call."""
        ended, self._just_ended = self._just_ended, []
        return ended

    def _step(self) -> None:
        report = self._engine.step()
        now, stats = self._runner.now, report.step
        self._stats = report.scheduler
        self._steps += 1
        self._step_seconds += stats.step_seconds
        self._prefilled += stats.prefill_tokens
        self._decoded += stats.decode_tokens
        self._cached_tokens += stats.prefix_cache_hit_tokens
        for output in report.outputs:
            progress = self._alive[output.request_id]
            if progress.first is None:
                progress.first = now
            else:
                self._gap(progress, now)
            progress.last = now
            if output.finish_reason is not None:
                self._ended += 1
                self._ended_prompt += progress.arrival.prompt
                self._ended_generated += progress.arrival.generate
                del self._alive[output.request_id]
                self._just_ended.append(progress.arrival)
                self._log.served.append((progress.arrival.begun, progress.first, now, progress.met))

    def _gap(self, progress: _Progress, now: float) -> None:
        late = now - progress.last > self._limit
        self._log.gaps += 1
        self._log.late_gaps += late
        progress.met &= not late


def _tokens(arrival: Arrival, number: int) -> list[int]:
    """Return a prompt whose blocks are equal to those of other prompts with the same numbers, and to no other ones.

    The tokens of a block are the bits of its number; the last bit tells shared blocks from others. Answers are all
    alike, so no prompt continues an answer: only the approximate replica finds the blocks of answers.
    """
    shared = arrival.blocks[: arrival.prompt // _BLOCK]
    own = range(-(-arrival.prompt // _BLOCK) - len(shared))
    numbers = [*(2 * block for block in shared), *(2 * (number << 16 | block) + 1 for block in own)]
    return [(block >> place) & 1 for block in numbers for place in range(_BLOCK)][: arrival.prompt]
