"""Operator metrics. Names and labels are a contract with dashboards and alerts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen_operator.kinds import Key, Kind

# Type, status and reason of a condition.
ConditionLabels = tuple[str, str, str]

_DESIRED: Final = "fastgen_operator_desired_replicas"
_READY: Final = "fastgen_operator_ready_replicas"
_CONDITION: Final = "fastgen_operator_condition"
_DECISIONS: Final = "fastgen_operator_scaling_decisions"
_REASON: Final = "fastgen_operator_scaling_reason"
_SCRAPE_AGE: Final = "fastgen_operator_scrape_age_seconds"
_LOAD: Final = "fastgen_operator_scaling_load_replicas"
_RECOMMENDED: Final = "fastgen_operator_recommended_replicas"
_LEARNED: Final = "fastgen_operator_learned_replicas"
_STRAGGLER: Final = "fastgen_operator_straggler_speed_ratio"
_HELD: Final = "fastgen_operator_held_requests"
# Help and labels of the metrics per FastGenDeployment. All are gauges, except the decisions.
_PER_RESOURCE: Final = {
    _DESIRED: ("Desired replicas.",),
    _READY: ("Ready replicas of the current pod template.",),
    _CONDITION: (
        "1 for the current status and reason of each condition of a FastGenDeployment.",
        *("type", "status", "reason"),
    ),
    _DECISIONS: ("Autoscaler decisions that changed the replicas or the reason, by reason.", "reason"),
    _REASON: ("1 for the reason of the autoscaler's last decision.", "reason"),
    _SCRAPE_AGE: ("Seconds since the last successful scrape of the engines.",),
    _LOAD: ("Smoothed demand, in fully utilized replicas. Absent while it is unknown.",),
    _RECOMMENDED: ("Replicas that the autoscaler decided on. In a dry run they are not the desired ones.",),
    _LEARNED: (
        "Lower bound of the replicas that the arrivals of the last hours, and of earlier days at this time, require; "
        "minReplicas if they require no higher one. Absent before the first rehearsal.",
    ),
    _STRAGGLER: (
        "Speed of a replica that is much slower than the others, relative to their median. Absent for the others.",
        "pod",
    ),
    _HELD: ("Requests that the gateway holds until a replica is ready. Absent unless minReplicas is 0.",),
}

# Values of one metric by its labels besides namespace and name.
_Values = Mapping[tuple[str, ...], float]


class Metrics(Collector):
    """The operator's metrics, in their own registry. Thread-safe.

    Metrics of a FastGenDeployment are labelled with its namespace and name, and removed with it: see `forget`. Unknown
    values are not exposed.

    Args:
        clock: monotonic time in seconds, for the age of scrapes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.reconcile_seconds = Histogram(
            "fastgen_operator_reconcile_seconds",
            "Duration of a reconcile in seconds, without those skipped.",
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.skipped = counter(
            "fastgen_operator_skipped_reconciles", "Reconciles skipped because nothing has changed since the last one."
        )
        self.errors = counter("fastgen_operator_reconcile_errors", "Failed reconciles. They are retried.")
        self.writes = counter(
            "fastgen_operator_writes", "Writes to the API server by kind. Constant in the steady state.", ["kind"]
        )
        self.api_requests = counter(
            "fastgen_operator_api_requests",
            "Requests to the API server, except watches, by method and HTTP status code (none: no response).",
            ["method", "code"],
        )
        self.leader = gauge("fastgen_operator_leader", "1 if this operator is the leader, 0 if it is on standby.")
        self.scrape_failures = counter(
            "fastgen_operator_scrape_failures", "Failed scrapes of engine metrics by reason.", ["reason"]
        )
        self.gateway_failures = counter(
            "fastgen_operator_gateway_failures",
            "Failed polls of the gateway's pods, and failed lists of them (NotListed), by reason.",
            ["reason"],
        )
        self.stalled_seconds = gauge(
            "fastgen_operator_stalled_seconds",
            "Longest time in seconds without a step of a running reconcile, of any worker while resources wait, or of "
            "the event loop.",
        )
        self._stale = gauge(
            "fastgen_operator_stale",
            "1 while a kind of objects cannot be listed or watched; namespace is empty for all namespaces.",
            ["kind", "namespace"],
        )
        self._clock = clock
        self._lock = Lock()
        self._resources: dict[Key, dict[str, _Values]] = {}
        self.registry.register(self)

    def show_source(self, source: tuple[Kind, str | None], fails: bool) -> None:
        """Set whether a kind cannot be read.

        Args:
            source: the kind, and the namespace; None for all namespaces.
        """
        kind, namespace = source
        self._stale.labels(kind.plural, namespace or "").set(fails)

    def set_replicas(self, key: Key, desired: int, ready: int) -> None:
        """Set a resource's desired and ready replicas."""
        self._set(key, {_DESIRED: {(): desired}, _READY: {(): ready}})

    def set_conditions(self, key: Key, conditions: Sequence[ConditionLabels]) -> None:
        """Replace a resource's conditions."""
        self._set(key, {_CONDITION: dict.fromkeys(conditions, 1)})

    def count_decision(self, key: Key, reason: str) -> None:
        """Count a new decision of the autoscaler, holds included, and set its reason as the last one."""
        with self._lock:
            metrics = self._resources.setdefault(key, {})
            counts = metrics.get(_DECISIONS, {})
            metrics[_DECISIONS] = {**counts, (reason,): counts.get((reason,), 0) + 1}
            metrics[_REASON] = {(reason,): 1}

    def mark_scraped(self, key: Key) -> None:
        """Record a successful scrape of a resource's engines."""
        self._set(key, {_SCRAPE_AGE: {(): self._clock()}})

    def clear_scrape(self, key: Key) -> None:
        """Remove the age of a resource's last scrape: it has no engines."""
        self._set(key, {_SCRAPE_AGE: {}})

    def set_stragglers(self, key: Key, stragglers: dict[str, float]) -> None:
        """Replace a resource's slow replicas: their speed relative to the median, by pod."""
        self._set(key, {_STRAGGLER: {(pod,): ratio for pod, ratio in stragglers.items()}})

    def set_load(self, key: Key, load: float | None) -> None:
        """Set a resource's demand in fully utilized replicas; None if it is unknown, or the resource is not
        autoscaled.
        """
        self._set(key, {_LOAD: {} if load is None else {(): load}})

    def set_recommended(self, key: Key, replicas: int | None) -> None:
        """Set the replicas that the autoscaler decided on for a resource; None if it does not decide."""
        self._set(key, {_RECOMMENDED: {} if replicas is None else {(): replicas}})

    def set_learned(self, key: Key, replicas: int | None) -> None:
        """Set the lower bound that was learned for a resource; None if none can be."""
        self._set(key, {_LEARNED: {} if replicas is None else {(): replicas}})

    def set_held(self, key: Key, requests: int | None) -> None:
        """Set the requests that the gateway holds for a resource; None if it is not asked."""
        self._set(key, {_HELD: {} if requests is None else {(): requests}})

    def forget(self, key: Key) -> None:
        """Remove the metrics of a deleted resource, if any."""
        with self._lock:
            self._resources.pop(key, None)

    def _set(self, key: Key, metrics: Mapping[str, _Values]) -> None:
        with self._lock:
            self._resources.setdefault(key, {}).update(metrics)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics per FastGenDeployment, built at scrape time, so that no stale labels remain."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, (text, *labels) in _PER_RESOURCE.items():
            family = CounterMetricFamily if name == _DECISIONS else GaugeMetricFamily
            families[name] = family(name, text, labels=["namespace", "name", *labels])
        now = self._clock()
        with self._lock:
            for key, metrics in self._resources.items():
                for name, values in metrics.items():
                    for more, value in values.items():
                        families[name].add_metric([*key, *more], now - value if name == _SCRAPE_AGE else value)
        return families.values()
