"""This project's gateway: its own module for decisions, with the metrics of the simulated replicas as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.autoscaling.fleet import Pod
from benchmarks.autoscaling.manifests import MODEL, exposition
from benchmarks.autoscaling.replica import Arrival, ReplicaMetrics
from benchmarks.autoscaling.routing.unended import Unended
from benchmarks.autoscaling.steps import BLOCK_TOKENS
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.request_body import BLOCK_BYTES, MOST_BLOCKS, RequestBody
from fastgen_gateway.routing.router import Choice, Router
from fastgen_operator.autoscale.scrape.exposition import parse_sample
from fastgen_operator.kinds import Key

_EXPOSED: Final = Exposed("benchmark", MODEL, MODEL, "2026-01-01T00:00:00Z")


class Gateway:
    """One picker. It sees each request and the end of each answer, and scrapes twice a second, as in a cluster."""

    scrape_seconds: float | None = 0.5

    def __init__(self, _: random.Random) -> None:
        self._now = 0.0
        self._router = Router(lambda: self._now, HoldLimits())
        self._router.set_deployments([_EXPOSED])
        self._unended = Unended[Choice]()
        self.reasons: dict[str, int] = {}

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Take a round of scrapes."""
        self._now = now
        for each in metrics:
            self._router.observe(_EXPOSED.key, each.pod, parse_sample(exposition(each), MODEL, now), now)

    def num_ready(self) -> Iterator[tuple[Key, int, int]]:
        """Yield the deployment with its numbers of ready replicas and of requests in flight."""
        return self._router.num_ready()

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:
        """Return the pod that the picker chooses."""
        self._now = arrival.time
        for choice in self._unended.end(pods, arrival.time):
            self._router.end(choice)
        by_name = {pod.name: pod for pod in pods}
        self._router.set_endpoints(_EXPOSED.key, by_name)
        choice = self._router.arrive(_body(arrival))
        assert isinstance(choice, Choice), "the fleet has pods, and nothing is held"
        self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1
        pod = by_name[choice.address]
        self._unended.add(pod, arrival, choice)
        return pod


def _body(arrival: Arrival) -> RequestBody:
    """Return what the picker reads of a request. Its blocks of 256 bytes are here exactly the engine's 64 tokens."""
    blocks = arrival.blocks[: min(arrival.prompt // BLOCK_TOKENS, MOST_BLOCKS)]
    return RequestBody(MODEL, arrival.prompt * BLOCK_BYTES // BLOCK_TOKENS, arrival.prompt, blocks)
