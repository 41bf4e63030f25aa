"""Interface of a simulated replica: accepts requests, advances time and returns metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.autoscaling.device import Device
from fastgen.core.step_times import StepCoefficients

# Tolerance for the inter-token target: the engine sizes steps to take exactly the target.
TOLERANCE = 1.02


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request: arrival time in seconds, prompt tokens and generated tokens. It is equal only to itself.

    Attributes:
        blocks: a positive number for each full block of the prompt and of the answer; it stands for all tokens up to
            its end, so that prompts share the numbers of their common prefix. Empty for a prompt that shares nothing.
        opening: a number for the beginning of the first message, which the requests of a conversation share.
        waited: seconds that the client had spent on earlier attempts.
        retries: how often the client will try again.
    """

    time: float
    prompt: int
    generate: int
    blocks: tuple[int, ...] = ()
    opening: int = 0
    waited: float = 0.0
    retries: int = 0

    @property
    def begun(self) -> float:
        """When the client tried for the first time."""
        return self.time - self.waited

    def again(self, now: float) -> Arrival:
        """Return the client's next attempt."""
        return replace(self, time=now, waited=now - self.begun, retries=self.retries - 1)


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds: time to first token, and time between two tokens."""

    first_token: float
    gap: float


@dataclass(slots=True)
class ReplicaMetrics:
    """Metrics from one scrape of one replica, with the names of the engine's metrics: gauges, then counters.

    `fit` returns the coefficients of the engine's fit; `time` is the scrape time.
    """

    pod: str
    time: float
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int
    token_budget: int
    max_sequences: int
    backlog_prompt_tokens: int
    oldest_waiting_seconds: float
    fit: Callable[[], StepCoefficients]
    scheduled_prefill_tokens: int
    scheduled_decode_tokens: int
    steps: int
    step_seconds: float
    ended: int
    ended_prompt_tokens: int
    ended_generated_tokens: int
    rejected: int
    arrived_prompt_tokens: int
    rejected_prompt_tokens: int
    cancelled_prompt_tokens: int
    cached_prompt_tokens: int

    @property
    def in_flight(self) -> int:
        """Running and waiting requests."""
        return self.running + self.waiting


@dataclass(slots=True)
class RequestLog:
    """Outcome of every request, in the order of their ends on each replica. Times in seconds.

    Attributes:
        served: (arrival, first token, end, whether all gaps were in time) of completed requests.
        lost: arrivals of rejected, cancelled or aborted requests.
        again: those whose clients will try again.
        prompts: (arrival, prompt tokens, those found in the prefix cache) of completed requests.
        gaps, late_gaps: number of gaps between tokens, and of those beyond the target.
    """

    served: list[tuple[float, float, float, bool]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    again: list[Arrival] = field(default_factory=list)
    prompts: list[tuple[float, int, int]] = field(default_factory=list)
    gaps: int = 0
    late_gaps: int = 0

    def lose(self, arrival: Arrival) -> None:
        """Record a request that was not served, unless its client tries again."""
        if arrival.retries:
            self.again.append(arrival)
        else:
            self.lost.append(arrival.begun)


class Replica(Protocol):
    """A simulated engine. Its clock only advances in `run_until` and `drain`."""

    def add(self, arrival: Arrival) -> None:
        """Submit a request. `run_until` its arrival time must have been called before."""

    def run_until(self, now: float) -> None:
        """Run all steps that start before `now`; the last one can end later."""

    def drain(self, deadline: float) -> float:
        """Finish all requests or abort them at `deadline`; return when the last one ended."""

    def metrics(self, pod: str, now: float) -> ReplicaMetrics:
        """Return what a scrape returns now."""

    def ended(self) -> list[Arrival]:
        """Return the requests that ended, answered or not, since the last call."""

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""

    @property
    def backlog(self) -> int:
        """Prompt tokens not yet computed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Configuration of every replica of a run.

    Attributes:
        targets: latency targets; the engine sizes its steps for the gap (`--inter-token-target`).
        prefix_cache: whether the engine has a prefix cache.
        max_queued: maximum number of queued requests; more are rejected (`--max-queued-requests`).
        patience: seconds after which a client gives up a request that has no token yet.
        retries: how often a client tries again after it gave up or was rejected.
    """

    device: Device
    targets: Targets
    prefix_cache: bool = False
    max_queued: int = 1024
    patience: float = math.inf
    retries: int = 0


MakeReplica = Callable[[Engine, RequestLog, float], Replica]
