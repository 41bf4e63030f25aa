"""The pods of one deployment, as Kubernetes makes and removes them, and the Service in front of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.autoscaling.replica import Arrival, Engine, Ledger, MakeReplica, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the fleet runs. Times in seconds.

    Attributes:
        gpus: one for each pod; a pod that finds none is pending.
        start: a pod's time from its GPU to ready, drawn for each: image, weights, warm-up.
        propagation: until the Service knows that a pod is ready, or that it is being deleted.
        pre_stop, drain: what a pod that is being deleted waits before it stops taking requests, and has to finish.
        scrape_loss: the share of scrapes that fail.
        scrape_noise: gauges are off by this share of themselves, up or down, at most.
    """

    gpus: int = 1_000_000
    start: Callable[[random.Random], float] = lambda rng: rng.uniform(50.0, 70.0)
    propagation: float = 1.0
    pre_stop: float = 15.0
    drain: float = 60.0
    scrape_loss: float = 0.02
    scrape_noise: float = 0.05


# What is under way at the end of a run has this many seconds to end.
_AFTERMATH = 7200.0


class State(Enum):
    """What a pod is at the moment."""

    PENDING = "no GPU yet"
    STARTING = "loading"
    READY = "ready"
    DRAINING = "being deleted"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Pod:
    """One of them."""

    name: str
    created: float
    state: State = State.PENDING
    scheduled: float = 0.0
    replica: Replica | None = None


Later = Callable[[float, Callable[[float], None]], None]
Balancer = Callable[[random.Random, list[Pod]], Pod]


def random_pod(rng: random.Random, pods: list[Pod]) -> Pod:
    """What kube-proxy does for a Service, be it by iptables or nftables."""
    return pods[int(rng.random() * len(pods))]


def least_loaded(rng: random.Random, pods: list[Pod]) -> Pod:
    """The one of two random pods that has fewer requests (Mitzenmacher, 2001): a gateway that counts connections."""
    one, other = random_pod(rng, pods), random_pod(rng, pods)
    return one if _load(one) <= _load(other) else other


def _load(pod: Pod) -> int:
    assert pod.replica is not None
    return pod.replica.in_flight


@dataclass(slots=True)
class Fleet:
    """Keeps as many pods as are wanted; `later` calls it back at a time.

    `gpu_seconds` and `changes` grow as pods go and as what is wanted changes.
    """

    engine: Engine
    cluster: Cluster
    make: MakeReplica
    ledger: Ledger
    rng: random.Random
    balancer: Balancer
    later: Later
    pods: list[Pod] = field(default_factory=list)
    endpoints: list[Pod] = field(default_factory=list)
    wanted: int = 0
    gpu_intervals: list[tuple[float, float]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    created: int = 0
    starts: list[float] = field(default_factory=list)

    def of(self, *states: State) -> list[Pod]:
        """Pods in one of these states."""
        return [pod for pod in self.pods if pod.state in states]

    def begin(self, replicas: int) -> None:
        """The fleet as it is found: ready."""
        self.scale(0.0, replicas)
        for pod in self.pods:
            if pod.state is State.STARTING:
                self._ready(pod, 0.0)
                self._join(pod, 0.0)

    def scale(self, now: float, wanted: int) -> None:
        """As the Deployment's controller does it: deletes pods that are not ready first, then those with least work."""
        if wanted == self.wanted:
            return
        self.changes.append((now, wanted))
        self.wanted = wanted
        alive = self.of(State.PENDING, State.STARTING, State.READY)
        for _ in range(wanted - len(alive)):
            self.created += 1
            self.pods.append(Pod(str(self.created), now))
        order = (State.PENDING, State.STARTING, State.READY)
        alive.sort(key=lambda pod: (order.index(pod.state), _load(pod) if pod.replica else 0, -pod.created))
        for pod in alive[: max(0, len(alive) - wanted)]:
            self._delete(pod, now)
        self._schedule(now)

    def send(self, arrival: Arrival) -> None:
        """A request through the Service; without an endpoint it is refused."""
        if not self.endpoints:
            self.ledger.lost.append(arrival.time)
            return
        replica = self.balancer(self.rng, self.endpoints).replica
        assert replica is not None
        replica.run_until(arrival.time)
        replica.add(arrival)

    def run_until(self, now: float) -> None:
        """Lets all replicas catch up with the time."""
        for pod in self.pods:
            if pod.replica is not None:
                pod.replica.run_until(now)

    def close(self, now: float) -> None:
        """Ends the run: what is under way is finished and counted, and GPUs are counted until now."""
        for pod in self.pods:
            if pod.replica is not None:
                pod.replica.drain(now + _AFTERMATH)
            if pod.state is not State.PENDING:
                self.gpu_intervals.append((pod.scheduled, now))
        self.pods.clear()

    def _schedule(self, now: float) -> None:
        free = self.cluster.gpus - len(self.of(State.STARTING, State.READY, State.DRAINING))
        for pod in self.of(State.PENDING)[: max(0, free)]:
            pod.state, pod.scheduled = State.STARTING, now
            self.later(now + self.cluster.start(self.rng), lambda time, pod=pod: self._started(pod, time))  # type: ignore[misc]

    def _started(self, pod: Pod, now: float) -> None:
        if pod.state is State.STARTING:
            self.starts.append(now - pod.created)
            self._ready(pod, now)
            self.later(now + self.cluster.propagation, lambda time: self._join(pod, time))

    def _ready(self, pod: Pod, now: float) -> None:
        pod.state, pod.replica = State.READY, self.make(self.engine, self.ledger, now)

    def _join(self, pod: Pod, _: float) -> None:
        if pod.state is State.READY and pod not in self.endpoints:
            self.endpoints.append(pod)

    def _delete(self, pod: Pod, now: float) -> None:
        if pod.state is not State.READY:
            self._gone(pod, now)
            return
        pod.state = State.DRAINING
        self.later(now + self.cluster.propagation, lambda _: self._leave(pod))
        self.later(now + self.cluster.pre_stop, lambda time: self._stop(pod, time))

    def _leave(self, pod: Pod) -> None:
        if pod in self.endpoints:
            self.endpoints.remove(pod)

    def _stop(self, pod: Pod, now: float) -> None:
        """SIGTERM: no request comes any more, so how it ends is known at once."""
        assert pod.replica is not None
        pod.replica.run_until(now)
        ended = max(now, pod.replica.drain(now + self.cluster.drain))
        pod.replica = None
        self.later(ended, lambda time: self._gone(pod, time))

    def _gone(self, pod: Pod, now: float) -> None:
        if pod.state is not State.PENDING:
            self.gpu_intervals.append((pod.scheduled, now))
        pod.state = State.GONE
        self.pods.remove(pod)
        self._schedule(now)
