"""Discrete-event simulation of a trace, a fleet and a policy."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.fleet import Cluster, Fleet, MakeRouting, Pod, State, service
from benchmarks.autoscaling.replica import Engine, MakeReplica, ReplicaMetrics, RequestLog
from benchmarks.autoscaling.traces import Trace

_SAMPLE_SECONDS = 5.0  # interval between fleet samples, for the plots and the worst backlog


@dataclass(frozen=True, slots=True)
class View:
    """Input of a policy.

    Attributes:
        replicas: metrics of the ready pods whose scrape succeeded.
        ready: names of ready pods.
        pending_ages: seconds since the creation of each pod that is not ready yet.
        start_seconds: median time from creation to ready of the newest pods; None if unknown.
        desired_replicas: current replicas of the Deployment.
        pods: all pods. A policy may read only what Kubernetes shows of them: `benchmarks.autoscaling.manifests`.
    """

    now: float
    replicas: tuple[ReplicaMetrics, ...]
    ready: frozenset[str]
    pending_ages: tuple[float, ...]
    start_seconds: float | None
    terminating: int
    desired_replicas: int
    pods: tuple[Pod, ...] = ()

    @property
    def alive(self) -> int:
        """Number of ready and pending pods."""
        return len(self.ready) + len(self.pending_ages)


class Policy(Protocol):
    """An autoscaling policy."""

    @property
    def period(self) -> float:
        """Interval between decisions in seconds."""

    def observe(self, view: View) -> int:
        """Return the desired replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Input of a simulation.

    Attributes:
        begin: initial replicas.
        least, most: bounds on the replicas of every policy.
        routing: how requests are routed; without a router, as a Service does.
    """

    trace: Trace
    engine: Engine
    cluster: Cluster
    begin: int
    least: int = 1
    most: int = 16
    routing: MakeRouting = service
    seed: int = 1


@dataclass(frozen=True, slots=True)
class FleetSample:
    """State of the fleet at one moment."""

    time: float
    desired_replicas: int
    ready: int
    backlog: int


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a simulation."""

    scenario: Scenario
    log: RequestLog
    gpu_intervals: tuple[tuple[float, float], ...]
    changes: tuple[tuple[float, int], ...]
    samples: tuple[FleetSample, ...]
    num_arrivals: int


def simulate(scenario: Scenario, policy: Policy, make: MakeReplica = ApproximateReplica) -> Run:
    """Run the trace to its end, then finish all requests in flight."""
    events: list[tuple[float, int, Callable[[float], None]]] = []
    ordinal = 0

    def schedule(time: float, action: Callable[[float], None]) -> None:
        nonlocal ordinal
        ordinal += 1
        heapq.heappush(events, (time, ordinal, action))

    log, samples = RequestLog(), []
    rng = random.Random(scenario.seed)
    routing = scenario.routing(rng)
    fleet = Fleet(scenario.engine, scenario.cluster, make, log, rng, routing, schedule)
    scraper, router_scraper = random.Random(scenario.seed + 1), random.Random(scenario.seed + 2)

    def decide(now: float) -> None:
        fleet.run_until(now)
        recommended = policy.observe(_view(fleet, scraper, now))
        fleet.scale(now, min(scenario.most, max(scenario.least, recommended)))
        schedule(now + policy.period, decide)

    def sample(now: float) -> None:
        fleet.run_until(now)
        backlog = sum(pod.replica.backlog for pod in fleet.pods if pod.replica)
        samples.append(FleetSample(now, fleet.desired_replicas, len(fleet.of(State.READY)), backlog))
        again, log.again = log.again, []
        for arrival in again:
            fleet.send(arrival.again(now))
        schedule(now + _SAMPLE_SECONDS, sample)

    def scrape(now: float) -> None:
        assert routing.scrape_seconds is not None
        fleet.run_until(now)
        routing.observe(_scraped(fleet, router_scraper, now), now)
        schedule(now + routing.scrape_seconds, scrape)

    fleet.begin(scenario.begin)
    schedule(policy.period, decide)
    if routing.scrape_seconds is not None:
        schedule(routing.scrape_seconds, scrape)
    schedule(_SAMPLE_SECONDS, sample)
    end, num_arrivals, retries = scenario.trace.seconds, 0, scenario.engine.retries
    for arrival in scenario.trace.arrivals(scenario.seed):
        num_arrivals += 1
        while events[0][0] <= arrival.time:
            _run_next(events)
        fleet.send(replace(arrival, retries=retries) if retries else arrival)
    while events[0][0] <= end:
        _run_next(events)
    fleet.close(end)
    log.lost += [arrival.begun for arrival in log.again]
    return Run(scenario, log, tuple(fleet.gpu_intervals), tuple(fleet.changes), tuple(samples), num_arrivals)


def _run_next(events: list[tuple[float, int, Callable[[float], None]]]) -> None:
    time, _, action = heapq.heappop(events)
    action(time)


def _view(fleet: Fleet, rng: random.Random, now: float) -> View:
    ready = fleet.of(State.READY)
    waiting = fleet.of(State.PENDING, State.STARTING)
    return View(
        now,
        _scraped(fleet, rng, now),
        frozenset(pod.name for pod in ready),
        tuple(now - pod.created for pod in waiting),
        median(list(fleet.starts)[-8:]) if fleet.starts else None,
        len(fleet.of(State.DRAINING)),
        fleet.desired_replicas,
        tuple(fleet.pods),
    )


def _scraped(fleet: Fleet, rng: random.Random, now: float) -> tuple[ReplicaMetrics, ...]:
    """Return the metrics of the ready pods whose scrape succeeds."""
    ready = fleet.of(State.READY)
    return tuple(_scrape(pod, fleet.cluster, rng, now) for pod in ready if rng.random() >= fleet.cluster.scrape_loss)


def _scrape(pod: Pod, cluster: Cluster, rng: random.Random, now: float) -> ReplicaMetrics:
    """Return a pod's metrics with noise on the gauges."""
    assert pod.replica is not None
    metrics = pod.replica.metrics(pod.name, now)
    off = 1 + cluster.scrape_noise * rng.uniform(-1, 1)
    return replace(
        metrics,
        kv_tokens=round(metrics.kv_tokens * off),
        backlog_prompt_tokens=round(metrics.backlog_prompt_tokens * off),
    )
