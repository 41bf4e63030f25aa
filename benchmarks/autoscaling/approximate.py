"""A replica that approximates the engine arithmetically, at the cost of a few operations per step.

The real scheduler iterates over all sequences in every step. Here a step only knows the number of decoding sequences,
their resident tokens and the next prompt, and steps without prompt tokens are processed in batches. Chunk sizes come
from the engine's own code, and so does the fit of the step model, to times with a measurement error. Not modelled:
blocks (a full cache admits nothing, and nothing is preempted) and the prefix cache.
`tests/operator/autoscale/test_simulator.py` compares it with the real scheduler.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from benchmarks.autoscaling.replica import TOLERANCE, Arrival, Engine, ReplicaMetrics, RequestLog
from fastgen.core.chunking import Chunker, FixedTarget, StepLoad
from fastgen.core.step_model import StepModel

_STEP_ERROR = 0.05  # largest relative error of a measured step
_LOOK_AHEAD = 64  # steps of backlog that chunking considers, as in fastgen.core.scheduler


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    ordinal: int  # in order of arrival
    left: int  # prompt tokens not yet computed
    first: float = 0.0
    late_before: int = 0


class ApproximateReplica:
    """An approximate engine: see `benchmarks.autoscaling.replica.Replica`."""

    def __init__(self, engine: Engine, log: RequestLog, now: float) -> None:
        self._device = engine.device
        self._log = log
        self._limit = engine.targets.gap * TOLERANCE
        self._max_queued = engine.max_queued
        self._patience = engine.patience
        self._step_model = StepModel()
        self._errors = random.Random(now)
        self._chunker = Chunker("even", FixedTarget(engine.targets.gap, engine.device))
        self._clock = now
        self._waiting: dict[int, _Request] = {}  # by ordinal, in order of arrival
        self._shortest: list[tuple[int, int]] = []  # heap of prompt tokens and ordinal, also of some that wait no more
        self._partial: dict[int, _Request] = {}  # by ordinal
        # A decoding sequence gets a token in every step, so its last step is known when decoding starts.
        self._decoding: list[tuple[int, int, _Request]] = []
        self._ordinal = 0
        self._kv_tokens = 0
        self._pending = 0
        self._late = 0  # number of steps that exceeded the target
        self._steps = 0
        self._step_seconds = 0.0
        self._prefilled = 0
        self._decoded = 0
        self._ended = self._ended_prompt = self._ended_generated = self._rejected = 0
        self._arrived_tokens = self._rejected_tokens = self._cancelled_tokens = 0

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""
        return len(self._waiting) + len(self._partial) + len(self._decoding)

    def add(self, arrival: Arrival) -> None:
        """Queue or reject a request."""
        self._arrived_tokens += arrival.prompt
        if len(self._waiting) >= self._max_queued:
            self._log.lost.append(arrival.time)
            self._rejected += 1
            self._rejected_tokens += arrival.prompt
            return
        self._clock = max(self._clock, arrival.time)
        self._ordinal += 1
        self._waiting[self._ordinal] = _Request(arrival, self._ordinal, arrival.prompt)
        heapq.heappush(self._shortest, (arrival.prompt, self._ordinal))
        self._pending += arrival.prompt

    def run_until(self, now: float) -> None:
        """Run all steps that start before `now`."""
        while self._clock < now:
            if self._pending:
                self._step()
            elif self._decoding:
                self._decode(now)
            else:
                self._clock = now

    def drain(self, deadline: float) -> float:
        """Finish all requests or abort them at `deadline`."""
        while self.in_flight and self._clock < deadline:
            if self._pending:
                self._step()
            else:
                self._decode(deadline)
        waiting, partial = self._waiting.values(), self._partial.values()
        cut = [*waiting, *partial, *(request for _, _, request in self._decoding)]
        self._log.lost += [request.arrival.time for request in cut]
        return min(self._clock, deadline)

    def metrics(self, pod: str, now: float) -> ReplicaMetrics:
        """Return what a scrape returns."""
        device = self._device
        self._cancel(now)
        return ReplicaMetrics(
            pod=pod,
            time=now,
            running=len(self._partial) + len(self._decoding),
            waiting=len(self._waiting),
            kv_tokens=self._kv_tokens,
            kv_capacity_tokens=device.kv_tokens,
            token_budget=device.token_budget,
            max_sequences=device.max_sequences,
            backlog_prompt_tokens=self._pending,
            oldest_waiting_seconds=max(0.0, now - self._oldest_waiting().arrival.time) if self._waiting else 0.0,
            step_model=self._step_model.coefficients,
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
            cancelled_prompt_tokens=self._cancelled_tokens,
        )

    def _step(self) -> None:
        """Run one step with all decodes and a share of the pending prompts."""
        self._cancel(self._clock)
        if not self._pending and not self._decoding:
            return
        decodes = len(self._decoding)
        began = self._fill(decodes, self._share(decodes))
        tokens = decodes + sum(began.values())
        self._kv_tokens += tokens
        seconds = self._device.seconds(tokens, self._kv_tokens)
        self._clock += seconds
        self._record(1, decodes, tokens, seconds, late=int(seconds > self._limit))
        self._end_decodes()
        for ordinal in began:
            if not self._partial[ordinal].left:
                self._first_token(self._partial.pop(ordinal))

    def _oldest_waiting(self) -> _Request:
        return next(iter(self._waiting.values()))

    def _cancel(self, now: float) -> None:
        """Drop the waiting requests whose clients gave up."""
        while self._waiting and now - self._oldest_waiting().arrival.time > self._patience:
            arrival = self._waiting.pop(self._oldest_waiting().ordinal).arrival
            self._log.lost.append(arrival.time)
            self._pending -= arrival.prompt
            self._cancelled_tokens += arrival.prompt
            self._ended += 1
            self._ended_prompt += arrival.prompt

    def _share(self, decodes: int) -> int:
        """Return the prompt tokens of the next step."""
        room = self._device.token_budget - decodes
        if room < 1:
            return 0
        free = self._device.max_sequences - decodes - len(self._partial)
        backlog = self._pending
        if free < len(self._waiting):
            backlog = sum(r.left for r in self._partial.values())
            backlog += self._oldest_waiting().left * free if free > 0 else 0
        backlog = min(backlog, room * _LOOK_AHEAD)
        if not backlog:
            return 0
        share = self._chunker.prompt_tokens(room, StepLoad(decodes, self._kv_tokens, backlog))
        return min(room, share, max(0, self._device.kv_tokens - self._kv_tokens - decodes))

    def _fill(self, decodes: int, share: int) -> dict[int, int]:
        """Compute `share` prompt tokens: half of them of the oldest prompt, the rest of the shortest ones.

        Returns:
            Number of tokens by the request's ordinal.
        """
        filled: dict[int, int] = {}
        places = self._device.max_sequences - decodes - len(self._partial)

        def compute(request: _Request, most: int) -> None:
            nonlocal places, share
            if request.ordinal in self._waiting:
                self._partial[request.ordinal] = self._waiting.pop(request.ordinal)
                places -= 1
            size = min(most, request.left)
            request.left -= size
            share -= size
            self._pending -= size
            filled[request.ordinal] = filled.get(request.ordinal, 0) + size

        unfinished = [*self._partial.values()]
        if self._waiting and places > 0:
            unfinished.append(self._oldest_waiting())
        if share > 0 and unfinished:
            compute(min(unfinished, key=lambda request: request.ordinal), -(-share // 2))
        while share > 0 and (shortest := self._shortest_prompt(places)) is not None:
            compute(shortest, share)
        return filled

    def _shortest_prompt(self, places: int) -> _Request | None:
        """Return the prompt with the fewest tokens left; a waiting one only if there is a place for it."""
        while self._shortest and self._shortest[0][1] not in self._waiting:
            heapq.heappop(self._shortest)
        prompts = [request for request in self._partial.values() if request.left]
        if places > 0 and self._shortest:
            prompts.append(self._waiting[self._shortest[0][1]])
        return min(prompts, key=lambda request: request.left, default=None)

    def _decode(self, now: float) -> None:
        """Run decode-only steps, each a little longer than the one before, that start before `now`."""
        decodes = len(self._decoding)
        first = self._device.seconds(decodes, self._kv_tokens + decodes)
        growth = self._device.kv_token * decodes
        steps = min(self._decoding[0][0] - self._steps, _steps_within(now - self._clock, first, growth))
        seconds = steps * first + growth * steps * (steps - 1) / 2
        early = steps if growth <= 0 else min(steps, max(0, math.floor((self._limit - first) / growth) + 1))
        late = steps - early if growth > 0 or first <= self._limit else steps
        self._clock += seconds
        self._kv_tokens += steps * decodes
        self._record(steps, decodes, steps * decodes, seconds, late=late)
        self._end_decodes()

    def _record(self, steps: int, decodes: int, tokens: int, seconds: float, *, late: int) -> None:
        error = 1 + _STEP_ERROR * self._errors.uniform(-1, 1)
        self._step_model.observe(tokens // steps, self._kv_tokens, error * seconds / steps)
        self._steps += steps
        self._step_seconds += seconds
        self._prefilled += tokens - steps * decodes
        self._decoded += steps * decodes
        self._log.gaps += steps * decodes
        self._log.late_gaps += late * decodes
        self._late += late

    def _first_token(self, request: _Request) -> None:
        request.first, request.late_before = self._clock, self._late
        if request.arrival.generate == 1:
            self._end(request)
            return
        ends = self._steps + request.arrival.generate - 1
        heapq.heappush(self._decoding, (ends, request.ordinal, request))

    def _end_decodes(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._end(heapq.heappop(self._decoding)[2])

    def _end(self, request: _Request) -> None:
        arrival = request.arrival
        self._kv_tokens -= arrival.prompt + arrival.generate - 1
        self._ended += 1
        self._ended_prompt += arrival.prompt
        self._ended_generated += arrival.generate
        self._log.served.append((arrival.time, request.first, self._clock, self._late == request.late_before))


def _steps_within(seconds: float, first: float, growth: float) -> int:
    """Return how many steps start within `seconds`; the first takes `first`, each next one `growth` more."""
    if growth * seconds <= 1e-9 * first * first:
        return max(1, math.ceil(seconds / first))
    half = first - growth / 2
    return max(1, math.ceil((-half + math.sqrt(half * half + 2 * growth * seconds)) / growth))
