"""Operator metrics. Names and labels are a contract with dashboards and alerts."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen_operator.kinds import Key

# Type, status and reason of a condition.
ConditionLabels = tuple[str, str, str]


@dataclass(slots=True)
class _Figures:
    """Metrics of one FastGenDeployment. Values that are None are unknown and not exposed."""

    desired: int | None = None
    ready: int | None = None
    conditions: tuple[ConditionLabels, ...] = ()
    decisions: Tally[str] = field(default_factory=Tally)
    last_reason: str | None = None
    scraped_at: float | None = None
    load: float | None = None
    recommended: int | None = None
    stragglers: dict[str, float] = field(default_factory=dict)


class Metrics(Collector):
    """The operator's metrics, in their own registry. Thread-safe.

    Metrics of a FastGenDeployment are labelled with its namespace and name, and removed with it: see `forget`.

    Args:
        clock: monotonic time in seconds, for the age of scrapes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "fastgen_operator_reconcile_seconds",
            "Duration of a reconcile, in seconds.",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.errors = Counter(
            "fastgen_operator_reconcile_errors",
            "Failed reconciles. They are retried.",
            registry=self.registry,
        )
        self.writes = Counter(
            "fastgen_operator_writes",
            "Writes to the API server by kind. Constant in the steady state.",
            ["kind"],
            registry=self.registry,
        )
        self.api_requests = Counter(
            "fastgen_operator_api_requests",
            "Requests to the API server, except watches, by method and HTTP status code (none: no response).",
            ["method", "code"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "fastgen_operator_leader",
            "1 if this operator is the leader, 0 if it is on standby.",
            registry=self.registry,
        )
        self.scrape_failures = Counter(
            "fastgen_operator_scrape_failures",
            "Failed scrapes of engine metrics by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.stalled_seconds = Gauge(
            "fastgen_operator_stalled_seconds",
            "Seconds without a step of a worker, or of all workers while resources wait, or of the event loop.",
            registry=self.registry,
        )
        self._clock = clock
        self._lock = Lock()
        self._figures: dict[Key, _Figures] = {}
        self.registry.register(self)

    def set_replicas(self, key: Key, desired: int, ready: int) -> None:
        """Set a resource's desired and ready replicas."""
        with self._lock:
            figures = self._of(key)
            figures.desired, figures.ready = desired, ready

    def set_conditions(self, key: Key, conditions: Sequence[ConditionLabels]) -> None:
        """Replace a resource's conditions."""
        with self._lock:
            self._of(key).conditions = tuple(conditions)

    def count_decision(self, key: Key, reason: str) -> None:
        """Count a new decision of the autoscaler, holds included, and set its reason as the last one."""
        with self._lock:
            figures = self._of(key)
            figures.decisions[reason] += 1
            figures.last_reason = reason

    def mark_scraped(self, key: Key) -> None:
        """Record a successful scrape of a resource's engines."""
        with self._lock:
            self._of(key).scraped_at = self._clock()

    def clear_scrape(self, key: Key) -> None:
        """Remove the age of a resource's last scrape: it has no engines."""
        with self._lock:
            self._of(key).scraped_at = None

    def set_stragglers(self, key: Key, stragglers: dict[str, float]) -> None:
        """Replace a resource's slow replicas: their speed relative to the median, by pod."""
        with self._lock:
            self._of(key).stragglers = dict(stragglers)

    def set_load(self, key: Key, load: float | None) -> None:
        """Set a resource's demand in fully utilized replicas; None if it is not autoscaled."""
        with self._lock:
            self._of(key).load = load

    def set_recommended(self, key: Key, replicas: int | None) -> None:
        """Set the replicas that the autoscaler decided on for a resource; None if it does not decide."""
        with self._lock:
            self._of(key).recommended = replicas

    def forget(self, key: Key) -> None:
        """Remove the metrics of a deleted resource, if any."""
        with self._lock:
            self._figures.pop(key, None)

    def _of(self, key: Key) -> _Figures:
        return self._figures.setdefault(key, _Figures())

    def collect(self) -> Iterable[Metric]:
        """Return the metrics per FastGenDeployment, built at scrape time, so that no stale labels remain."""
        owner = ["namespace", "name"]
        desired = GaugeMetricFamily("fastgen_operator_desired_replicas", "Desired replicas.", labels=owner)
        ready = GaugeMetricFamily(
            "fastgen_operator_ready_replicas", "Ready replicas of the current pod template.", labels=owner
        )
        conditions = GaugeMetricFamily(
            "fastgen_operator_condition",
            "1 for the current status and reason of each condition of a FastGenDeployment.",
            labels=[*owner, "type", "status", "reason"],
        )
        decisions = CounterMetricFamily(
            "fastgen_operator_scaling_decisions",
            "Autoscaler decisions that changed the replicas or the reason, by reason.",
            labels=[*owner, "reason"],
        )
        last = GaugeMetricFamily(
            "fastgen_operator_scaling_reason",
            "1 for the reason of the autoscaler's last decision.",
            labels=[*owner, "reason"],
        )
        age = GaugeMetricFamily(
            "fastgen_operator_scrape_age_seconds",
            "Seconds since the last successful scrape of the engines.",
            labels=owner,
        )
        load = GaugeMetricFamily(
            "fastgen_operator_scaling_load_replicas",
            "Smoothed demand, in fully utilized replicas.",
            labels=owner,
        )
        recommended = GaugeMetricFamily(
            "fastgen_operator_recommended_replicas",
            "Replicas that the autoscaler decided on. In a dry run they are not the desired ones.",
            labels=owner,
        )
        stragglers = GaugeMetricFamily(
            "fastgen_operator_straggler_speed_ratio",
            "Speed of a replica that is much slower than the others, relative to their median. Absent for the others.",
            labels=[*owner, "pod"],
        )
        now = self._clock()
        with self._lock:
            for key, figures in self._figures.items():
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
                if figures.recommended is not None:
                    recommended.add_metric(key, figures.recommended)
                for pod, ratio in figures.stragglers.items():
                    stragglers.add_metric([*key, pod], ratio)
        return desired, ready, conditions, decisions, last, age, load, recommended, stragglers
