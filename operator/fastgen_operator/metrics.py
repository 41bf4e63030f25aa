"""What the operator tells Prometheus about itself. Names and labels are the contract with dashboards and alerts."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen_operator.kinds import Key

# A condition as it is exposed: its type, status and reason.
Shown = tuple[str, str, str]


@dataclass(slots=True)
class _Figures:
    """What is known of one FastGenDeployment. What is None has not been seen yet, and is not exposed."""

    desired: int | None = None
    ready: int | None = None
    conditions: tuple[Shown, ...] = ()
    decisions: Tally[str] = field(default_factory=Tally)
    last_reason: str | None = None
    scraped_at: float | None = None
    load: float | None = None


class Metrics:
    """The operator's metrics, in a registry of their own; safe to use from several threads.

    What is about one FastGenDeployment bears its namespace and name, and goes with it: see `forget`.

    Args:
        clock: monotonic seconds, for the age of scrapes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "fastgen_operator_reconcile_seconds",
            "Time of one reconcile, seconds.",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.errors = Counter(
            "fastgen_operator_reconcile_errors",
            "Reconciles that failed and are tried again.",
            registry=self.registry,
        )
        self.writes = Counter(
            "fastgen_operator_writes",
            "Writes to the API server by kind; none in the steady state.",
            ["kind"],
            registry=self.registry,
        )
        self.api_requests = Counter(
            "fastgen_operator_api_requests",
            "Requests to the API server but for the watches, by method and HTTP status; none where no answer came.",
            ["method", "code"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "fastgen_operator_leader",
            "1 where this operator is the one that acts, 0 where it stands by.",
            registry=self.registry,
        )
        self.scrape_failures = Counter(
            "fastgen_operator_scrape_failures",
            "Scrapes of engines that gave nothing usable, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._clock = clock
        self._lock = Lock()
        self._figures: dict[Key, _Figures] = {}
        self.registry.register(_PerResource(self._snapshot, clock))

    def set_replicas(self, key: Key, desired: int, ready: int) -> None:
        """Shows a resource's replicas."""
        with self._lock:
            figures = self._of(key)
            figures.desired, figures.ready = desired, ready

    def set_conditions(self, key: Key, conditions: Sequence[Shown]) -> None:
        """Shows a resource's conditions instead of those shown before."""
        with self._lock:
            self._of(key).conditions = tuple(conditions)

    def count_decision(self, key: Key, reason: str) -> None:
        """Counts a decision of the autoscaler that is news, to hold included; its reason is shown as the last one's."""
        with self._lock:
            figures = self._of(key)
            figures.decisions[reason] += 1
            figures.last_reason = reason

    def mark_scraped(self, key: Key) -> None:
        """A resource's engines have just been read."""
        with self._lock:
            self._of(key).scraped_at = self._clock()

    def set_load(self, key: Key, load: float) -> None:
        """Shows how many replicas a resource's demand would keep wholly busy."""
        with self._lock:
            self._of(key).load = load

    def forget(self, key: Key) -> None:
        """Takes a deleted resource out of the exposition; harmless where it is not in it."""
        with self._lock:
            self._figures.pop(key, None)

    def _of(self, key: Key) -> _Figures:
        return self._figures.setdefault(key, _Figures())

    def _snapshot(self) -> list[tuple[Key, _Figures]]:
        with self._lock:
            return [
                (key, replace(figures, decisions=figures.decisions.copy())) for key, figures in self._figures.items()
            ]


class _PerResource(Collector):
    """Exposes the figures as they are at the moment of the scrape, so that no label of the past stays behind."""

    def __init__(self, snapshot: Callable[[], list[tuple[Key, _Figures]]], clock: Callable[[], float]) -> None:
        self._snapshot, self._clock = snapshot, clock

    def collect(self) -> Iterator[Metric]:
        owner = ["namespace", "name"]
        desired = GaugeMetricFamily("fastgen_operator_desired_replicas", "Replicas that are wanted.", labels=owner)
        ready = GaugeMetricFamily(
            "fastgen_operator_ready_replicas", "Replicas of the current template that are ready.", labels=owner
        )
        conditions = GaugeMetricFamily(
            "fastgen_operator_condition",
            "1 for the status and reason that each condition of a FastGenDeployment has now.",
            labels=[*owner, "type", "status", "reason"],
        )
        decisions = CounterMetricFamily(
            "fastgen_operator_scaling_decisions",
            "Decisions of the autoscaler that were another or had another reason than the one before, by reason.",
            labels=[*owner, "reason"],
        )
        last = GaugeMetricFamily(
            "fastgen_operator_scaling_reason",
            "1 for the reason of the autoscaler's last decision.",
            labels=[*owner, "reason"],
        )
        age = GaugeMetricFamily(
            "fastgen_operator_scrape_age_seconds", "Seconds since the engines were last read.", labels=owner
        )
        load = GaugeMetricFamily(
            "fastgen_operator_scaling_load_replicas",
            "Replicas that the demand would keep wholly busy, smoothed.",
            labels=owner,
        )
        now = self._clock()
        for key, figures in self._snapshot():
            if figures.desired is not None:
                desired.add_metric(key, figures.desired)
            if figures.ready is not None:
                ready.add_metric(key, figures.ready)
            for condition in figures.conditions:
                conditions.add_metric([*key, *condition], 1)
            for reason, count in figures.decisions.items():
                decisions.add_metric([*key, reason], count)
            if figures.last_reason is not None:
                last.add_metric([*key, figures.last_reason], 1)
            if figures.scraped_at is not None:
                age.add_metric(key, now - figures.scraped_at)
            if figures.load is not None:
                load.add_metric(key, figures.load)
        yield from (desired, ready, conditions, decisions, last, age, load)
