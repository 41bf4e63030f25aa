"""The step loop: schedule, run, take note, report. One thread, no callbacks, no I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from fastgen.config import EngineConfig
from fastgen.core.blocks import BlockPool
from fastgen.core.output import PassResult
from fastgen.core.request import Request, RequestError
from fastgen.core.scheduler import Pass, Scheduler
from fastgen.core.sequence import Sequence
from fastgen.messages import StepReport, StepStats, TokenOutput


class Architecture(Protocol):
    """What the engine has to know of a model's shape."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this minus one."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""


class Runner(Protocol):
    """Runs passes on a device: owns the weights and the KV cache tensors."""

    @property
    def architecture(self) -> Architecture:
        """The model's shape."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""

    @property
    def block_size(self) -> int:
        """Token slots of a block."""

    @property
    def max_model_length(self) -> int:
        """Longest prompt plus generation of one request; it fits in the KV cache."""

    def execute(self, pass_: Pass) -> PassResult:
        """Copies the blocks that the pass swaps, computes it, and samples."""


class Engine:
    """Continues prompts, many at once, a pass at a time.

    Drive it by calling `step` as long as `has_work`; requests may be added and cancelled between steps.
    """

    def __init__(self, runner: Runner, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._clock = clock
        self._scheduler = Scheduler(
            BlockPool(runner.num_blocks, runner.block_size),
            token_budget=config.most_tokens,
            max_sequences=config.sequence_limit,
            end_tokens=runner.architecture.eos_token_ids,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._seeds = random.SystemRandom()

    @property
    def has_work(self) -> bool:
        """Is there anything for `step` to do?"""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: when the model cannot serve it, or its id belongs to a request under way.
        """
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use: give each request its own", "request_id")
        request.check(self._runner.max_model_length, self._runner.architecture.vocab_size)
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            ordinal=self._num_added,
            arrival=self._clock(),
            seed=self._seeds.getrandbits(63) if seed is None else seed,
        )
        self._num_added += 1
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its blocks at once. False if there is no such request (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.cancel(sequence)
        return True

    def step(self) -> StepReport:
        """Runs one pass and says what came of it."""
        started = self._clock()
        pass_ = self._scheduler.schedule()
        queued = self._note_first_scheduled(pass_, started)
        decode_tokens = sum(chunk.sequence.is_decoding for chunk in pass_.chunks)
        prefill_tokens = pass_.num_tokens - decode_tokens
        result = self._runner.execute(pass_)
        grown = self._scheduler.complete(pass_, [sampled.token_id for sampled in result.sampled])
        outputs = [TokenOutput(request_id=s.id, token_ids=[s.tokens[-1]], finish_reason=s.finish_reason) for s in grown]
        for sequence in grown:
            if sequence.finish_reason is not None:
                del self._sequences[sequence.id]
        if not self.has_work:
            self._scheduler.check_integrity()
        return StepReport(
            outputs,
            self._stats(
                step_seconds=self._clock() - started,
                prefill_tokens=prefill_tokens,
                decode_tokens=decode_tokens,
                queue_seconds=queued,
                preemptions=len(pass_.preempted),
            ),
        )

    def idle_report(self, outputs: list[TokenOutput]) -> StepReport:
        """`outputs` and the state without a pass: what a cancellation leaves must be seen too."""
        return StepReport(
            outputs, self._stats(step_seconds=0.0, prefill_tokens=0, decode_tokens=0, queue_seconds=[], preemptions=0)
        )

    def _note_first_scheduled(self, pass_: Pass, now: float) -> list[float]:
        """Marks sequences that get into a pass for the first time; returns how long each had waited, in seconds."""
        waits = []
        for chunk in pass_.chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = now
                waits.append(now - chunk.sequence.arrival)
        return waits

    def _stats(
        self,
        *,
        step_seconds: float,
        prefill_tokens: int,
        decode_tokens: int,
        queue_seconds: list[float],
        preemptions: int,
    ) -> StepStats:
        state = self._scheduler.stats(self._clock())
        return StepStats(
            step_seconds=step_seconds,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            queue_seconds=queue_seconds,
            preemptions=preemptions,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            kv_tokens=state.kv_tokens,
            kv_blocks_used=state.kv_blocks_used,
            backlog_prompt_tokens=state.backlog_prompt_tokens,
            oldest_waiting_seconds=state.oldest_waiting_seconds,
        )
