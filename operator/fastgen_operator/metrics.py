"""What the operator tells Prometheus about itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fastgen_operator.kinds import Key


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
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
        self.desired = Gauge(
            "fastgen_operator_desired_replicas",
            "Replicas that the spec wants.",
            ["namespace", "name"],
            registry=self.registry,
        )
        self.ready = Gauge(
            "fastgen_operator_ready_replicas",
            "Replicas of the current template that are ready.",
            ["namespace", "name"],
            registry=self.registry,
        )

    def set_replicas(self, key: Key, desired: int, ready: int) -> None:
        """Shows a resource's replicas."""
        self.desired.labels(*key).set(desired)
        self.ready.labels(*key).set(ready)

    def forget(self, key: Key) -> None:
        """Takes a deleted resource out of the exposition."""
        for gauge in (self.desired, self.ready):
            gauge.remove(*key)
