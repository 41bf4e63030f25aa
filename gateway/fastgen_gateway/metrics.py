"""Metrics of the gateway. Names and labels are a contract with dashboards and alerts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.held_requests import Held
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.router import Choice, Router
from fastgen_operator.kinds import Key

_HOLD_SECONDS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 3600)
_RESOURCE: Final = ("namespace", "name")


class Metrics(Collector):
    """The gateway's metrics, in their own registry. Series of a deployment or client that is gone are removed.

    Args:
        router: whose state the gauges show.
        limits: of the clients, which are labelled by name, never by key.
    """

    def __init__(self, router: Router, limits: ClientLimits) -> None:
        self.registry = CollectorRegistry()
        self._router = router
        self._limits = limits
        self._requests = Counter(
            "fastgen_gateway_requests",
            "Requests by what became of them: routed, or the error code. Without a deployment, namespace and name are "
            "empty.",
            [*_RESOURCE, "outcome"],
            registry=self.registry,
        )
        self._retries = Counter(
            "fastgen_gateway_retries",
            "Requests answered by another replica than the first one that they were sent to.",
            _RESOURCE,
            registry=self.registry,
        )
        self._hold_seconds = Histogram(
            "fastgen_gateway_hold_seconds",
            "Time for which released requests were held, in seconds.",
            _RESOURCE,
            buckets=_HOLD_SECONDS,
            registry=self.registry,
        )
        self._scrape_failures = Counter(
            "fastgen_gateway_scrape_failures",
            "Failed scrapes of replicas, by reason.",
            [*_RESOURCE, "reason"],
            registry=self.registry,
        )
        self._client_requests = Counter(
            "fastgen_gateway_client_requests",
            "Requests with a valid API key, by client and by what became of them: routed, or the error code.",
            ["client", "outcome"],
            registry=self.registry,
        )
        self._client_tokens = Counter(
            "fastgen_gateway_client_tokens",
            "Tokens of requests that have ended, by client and kind (prompt or completion): from the "
            "usage in responses, or else from their bytes.",
            ["client", "kind"],
            registry=self.registry,
        )
        self._watch_failures = Counter(
            "fastgen_gateway_watch_failures", "Failed lists and watches, by kind.", ["kind"], registry=self.registry
        )
        self.registry.register(self)
        # Deployments and clients that may have series.
        self._keys: set[Key] = set()
        # Outcomes and reasons of a deployment that have series.
        self._outcomes = defaultdict[Key, set[str]](set)
        self._reasons = defaultdict[Key, set[str]](set)
        self._names: set[str] = set()

    def routed(self, choice: Choice, client: Client | None) -> None:
        """Count a request that is sent to a replica."""
        self._count(choice.key, client, "routed")

    def refused(self, key: Key | None, refusal: Refusal, client: Client | None) -> None:
        """Count a request that is answered with an error; without a deployment, `key` is None."""
        self._count(key, client, refusal.code)

    def used(self, client: str, prompt: int, completion: int) -> None:
        """Count the tokens of a client's request that has ended."""
        self._names.add(client)
        self._client_tokens.labels(client, "prompt").inc(prompt)
        self._client_tokens.labels(client, "completion").inc(completion)

    def released(self, held: Held, outcome: Choice | Refusal) -> None:
        """Count the end of a hold."""
        if isinstance(outcome, Choice):
            self._keys.add(held.key)
            self._hold_seconds.labels(*held.key).observe(outcome.sent.time - held.time)

    def answered(self, choice: Choice, address: str) -> None:
        """Count a retry if the replica that answers is not the chosen one."""
        if address != choice.address:
            self._keys.add(choice.key)
            self._retries.labels(*choice.key).inc()

    def scrape_failed(self, key: Key, reason: str) -> None:
        """Count a failed scrape of a replica."""
        self._keys.add(key)
        self._reasons[key].add(reason)
        self._scrape_failures.labels(*key, reason).inc()

    def watch_failed(self, kind: str) -> None:
        """Count a failed list or watch."""
        self._watch_failures.labels(kind).inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges of the router's state."""
        self._follow_labels()
        held = GaugeMetricFamily(
            "fastgen_gateway_held_requests", "Requests that wait for a ready replica.", labels=_RESOURCE
        )
        running = GaugeMetricFamily(
            "fastgen_gateway_requests_running", "Requests sent to a replica that have not ended.", labels=_RESOURCE
        )
        ready = GaugeMetricFamily("fastgen_gateway_ready_replicas", "Replicas that get requests.", labels=_RESOURCE)
        for key, num_replicas, in_flight in self._router.num_ready():
            held.add_metric(key, self._router.held.of(key).requests)
            running.add_metric(key, in_flight)
            ready.add_metric(key, num_replicas)
        clients = GaugeMetricFamily(
            "fastgen_gateway_client_requests_running",
            "Waiting and running requests of a client, which count towards its limit of concurrent requests.",
            labels=["client"],
        )
        for client, num_requests in self._limits.num_requests().items():
            clients.add_metric([client], num_requests)
        return held, running, ready, clients

    def _follow_labels(self) -> None:
        """Remove the series of what is gone, and start new ones at 0, so that a rate counts the first event."""
        keys, names = {key for key, _, _ in self._router.num_ready()}, set(self._limits.num_requests())
        # Not by a search for labels: it would look at all series for each deployment that is gone.
        for key in self._keys - keys:
            for metric in (self._retries, self._hold_seconds):
                metric.remove(*key)
            for outcome in self._outcomes.pop(key, ()):
                self._requests.remove(*key, outcome)
            for reason in self._reasons.pop(key, ()):
                self._scrape_failures.remove(*key, reason)
        for client in self._names - names:
            for metric in (self._client_requests, self._client_tokens):
                metric.remove_by_labels({"client": client})
        for key in keys:
            self._requests.labels(*key, "routed")
            self._outcomes[key].add("routed")
            self._retries.labels(*key)
            self._hold_seconds.labels(*key)
        for client in names:
            self._client_requests.labels(client, "routed")
        self._keys, self._names = keys, names

    def _count(self, key: Key | None, client: Client | None, outcome: str) -> None:
        self._requests.labels(*(key or ("", "")), outcome).inc()
        if key is not None:
            self._keys.add(key)
            self._outcomes[key].add(outcome)
        if client is not None:
            self._names.add(client.name)
            self._client_requests.labels(client.name, outcome).inc()
