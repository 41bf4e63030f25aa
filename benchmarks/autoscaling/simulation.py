"""A run: a trace, a policy, and everything between them, event by event."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from benchmarks.autoscaling.coarse import CoarseReplica
from benchmarks.autoscaling.fleet import Balancer, Cluster, Fleet, Pod, State, random_pod
from benchmarks.autoscaling.replica import Engine, Ledger, MakeReplica, Reading
from benchmarks.autoscaling.traces import Trace

_LOOK = 5.0  # seconds between two looks at the fleet for the plots and the worst backlog


@dataclass(frozen=True, slots=True)
class View:
    """What a policy is told.

    Attributes:
        readings: of ready pods whose scrape succeeded.
        ready: names of ready pods.
        pending_ages: seconds since creation of pods that are not ready yet.
        start_seconds: the median time from creation to ready of the newest pods; None before any was seen.
        wanted: replicas that the Deployment asks for now.
    """

    now: float
    readings: tuple[Reading, ...]
    ready: frozenset[str]
    pending_ages: tuple[float, ...]
    start_seconds: float | None
    terminating: int
    wanted: int

    @property
    def alive(self) -> int:
        """Pods that serve or will."""
        return len(self.ready) + len(self.pending_ages)


class Policy(Protocol):
    """Decides every `period` seconds how many replicas there should be."""

    @property
    def period(self) -> float:
        """Seconds between two decisions."""

    def observe(self, view: View) -> int:
        """The replicas wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What policies are compared on.

    `begin`: replicas at the start; `least` and `most`: the bounds that every policy is held to.
    """

    trace: Trace
    engine: Engine
    cluster: Cluster
    begin: int
    least: int = 1
    most: int = 16
    balancer: Balancer = random_pod
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment."""

    time: float
    wanted: int
    ready: int
    backlog: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it."""

    scenario: Scenario
    ledger: Ledger
    gpu_intervals: tuple[tuple[float, float], ...]
    changes: tuple[tuple[float, int], ...]
    looks: tuple[Look, ...]
    num_arrivals: int


def simulate(scenario: Scenario, policy: Policy, make: MakeReplica = CoarseReplica) -> Run:
    """Plays the trace to its end, and the requests under way to theirs."""
    events: list[tuple[float, int, Callable[[float], None]]] = []
    ordinal = 0

    def later(time: float, action: Callable[[float], None]) -> None:
        nonlocal ordinal
        ordinal += 1
        heapq.heappush(events, (time, ordinal, action))

    ledger, looks = Ledger(), []
    fleet = Fleet(
        scenario.engine, scenario.cluster, make, ledger, random.Random(scenario.seed), scenario.balancer, later
    )
    scraper = random.Random(scenario.seed + 1)

    def decide(now: float) -> None:
        fleet.run_until(now)
        wanted = policy.observe(_view(fleet, scraper, now))
        fleet.scale(now, min(scenario.most, max(scenario.least, wanted)))
        later(now + policy.period, decide)

    def look(now: float) -> None:
        fleet.run_until(now)
        backlog = sum(p.replica.reading(p.name, now).backlog_prompt_tokens for p in fleet.pods if p.replica)
        looks.append(Look(now, fleet.wanted, len(fleet.of(State.READY)), backlog))
        later(now + _LOOK, look)

    fleet.begin(scenario.begin)
    later(policy.period, decide)
    later(_LOOK, look)
    end, num_arrivals = scenario.trace.seconds, 0
    for arrival in scenario.trace.make(scenario.seed):
        num_arrivals += 1
        while events[0][0] <= arrival.time:
            _happen(events)
        fleet.send(arrival)
    while events[0][0] <= end:
        _happen(events)
    fleet.close(end)
    return Run(scenario, ledger, tuple(fleet.gpu_intervals), tuple(fleet.changes), tuple(looks), num_arrivals)


def _happen(events: list[tuple[float, int, Callable[[float], None]]]) -> None:
    time, _, action = heapq.heappop(events)
    action(time)


def _view(fleet: Fleet, rng: random.Random, now: float) -> View:
    ready = fleet.of(State.READY)
    waiting = fleet.of(State.PENDING, State.STARTING)
    readings = tuple(
        _scrape(pod, fleet.cluster, rng, now) for pod in ready if rng.random() >= fleet.cluster.scrape_loss
    )
    return View(
        now,
        readings,
        frozenset(pod.name for pod in ready),
        tuple(now - pod.created for pod in waiting),
        median(list(fleet.starts)[-8:]) if fleet.starts else None,
        len(fleet.of(State.DRAINING)),
        fleet.wanted,
    )


def _scrape(pod: Pod, cluster: Cluster, rng: random.Random, now: float) -> Reading:
    """Gauges with noise: counters have none."""
    assert pod.replica is not None
    reading = pod.replica.reading(pod.name, now)
    off = 1 + cluster.scrape_noise * rng.uniform(-1, 1)
    return replace(
        reading,
        kv_tokens=round(reading.kv_tokens * off),
        backlog_prompt_tokens=round(reading.backlog_prompt_tokens * off),
    )
