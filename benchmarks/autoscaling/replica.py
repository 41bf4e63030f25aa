"""What a replica is to the fleet: it takes requests, lets time go by, and says what a scrape of it would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.autoscaling.device import Device

# Gaps between tokens are met up to this much beyond the target: passes are shaped to take the target itself.
TOLERANCE = 1.02


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, its prompt's tokens and the tokens that it generates."""

    time: float
    prompt: int
    generate: int


@dataclass(frozen=True, slots=True)
class Targets:
    """What users were promised, in seconds: until the first token, and between any two tokens."""

    first_token: float
    gap: float


@dataclass(slots=True)
class Reading:
    """What one scrape of one replica gives: the engine's metrics of these names (design: gauges, then counters).

    `step_model` has base, token and kv_token of the engine's own fit; `time` is when they were true.
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
    step_model: tuple[float, float, float]
    scheduled_prefill_tokens: int
    scheduled_decode_tokens: int
    steps: int
    step_seconds: float
    ended: int
    ended_prompt_tokens: int
    ended_generated_tokens: int
    rejected: int

    @property
    def in_flight(self) -> int:
        """Requests that the replica has."""
        return self.running + self.waiting


@dataclass(slots=True)
class Ledger:
    """How requests ended, each once: their times in seconds, in the order of their ends on each replica.

    `served` has (arrival, first token, end, were all gaps met) of requests that were answered whole, `lost` the
    arrivals of those that were refused or cut off, `gaps` and `late_gaps` count the times between tokens.
    """

    served: list[tuple[float, float, float, bool]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    gaps: int = 0
    late_gaps: int = 0


class Replica(Protocol):
    """One engine. Time only moves forward, as far as it is told to."""

    def add(self, arrival: Arrival) -> None:
        """Takes a request at its time; `run_until` that time was called before."""

    def run_until(self, now: float) -> None:
        """Runs every pass that begins before `now`: the last one may end later."""

    def drain(self, deadline: float) -> float:
        """Runs to the end, without new requests, and cuts off at `deadline`; returns when the last one ended."""

    def reading(self, pod: str, now: float) -> Reading:
        """What a scrape says now."""

    @property
    def in_flight(self) -> int:
        """Requests that are not ended."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What every replica of a run is.

    Attributes:
        targets: what the ledger's gaps are measured by, and passes are shaped for (`--inter-token-target`).
        max_queued: requests that may wait; more are refused (`--max-queued-requests`).
    """

    device: Device
    targets: Targets
    max_queued: int = 1024


MakeReplica = Callable[[Engine, Ledger, float], Replica]
