"""Simulated pods of one Deployment and the Service in front of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from benchmarks.autoscaling.replica import Arrival, Engine, MakeReplica, Replica, ReplicaMetrics, RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Properties of the simulated cluster. Times in seconds.

    Attributes:
        gpus: number of GPUs; each pod needs one, and is pending without it.
        start: draws a pod's time from scheduling to ready: image, weights, warm-up.
        stuck: numbers of the pods, by creation, that never become ready.
        slow: step times of pods relative to the device's, by number.
        propagation: delay until the Service learns that a pod is ready or terminating.
        pre_stop, drain: time for which a terminating pod accepts requests, and then to finish them.
        scrape_loss: share of scrapes that fail.
        scrape_noise: maximum relative error of gauges.
    """

    gpus: int = 1_000_000
    start: Callable[[random.Random], float] = lambda rng: rng.uniform(50.0, 70.0)
    stuck: frozenset[int] = frozenset()
    slow: Mapping[int, float] = field(default_factory=dict)
    propagation: float = 1.0
    pre_stop: float = 15.0
    drain: float = 60.0
    scrape_loss: float = 0.02
    scrape_noise: float = 0.05


# Time for requests in flight to finish at the end of a run.
_DRAIN_SECONDS = 7200.0


class State(Enum):
    """Lifecycle state of a pod."""

    PENDING = "no GPU yet"
    STARTING = "loading"
    READY = "ready"
    DRAINING = "being deleted"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Pod:
    """A simulated pod. Times in seconds; `deleted` is when its deletion was requested."""

    name: str
    created: float
    state: State = State.PENDING
    scheduled: float = 0.0
    ready: float = 0.0
    deleted: float = 0.0
    replica: Replica | None = None


Schedule = Callable[[float, Callable[[float], None]], None]


class Routing(Protocol):
    """Chooses the pods of requests."""

    @property
    def scrape_seconds(self) -> float | None:
        """Interval between scrapes of all ready pods; None if the routing reads no metrics."""

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Take the metrics of the ready pods whose scrape succeeded."""

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:
        """Return the pod, of those in the Service, that gets a request now."""


# Creates a routing without state; it draws random numbers from the fleet's generator.
MakeRouting = Callable[[random.Random], Routing]
# Chooses a pod by its load at a time.
Balancer = Callable[[random.Random, list[Pod], float], Pod]


@dataclass(frozen=True, slots=True)
class _Balanced:
    """A routing that looks only at the present load."""

    rule: Balancer
    rng: random.Random
    scrape_seconds: float | None = None

    def observe(self, metrics: Sequence[ReplicaMetrics], now: float) -> None:
        """Ignore metrics."""

    def choose(self, pods: list[Pod], arrival: Arrival) -> Pod:
        """Apply the rule."""
        return self.rule(self.rng, pods, arrival.time)


def balanced(rule: Balancer) -> MakeRouting:
    """Return the routing that chooses pods by a rule."""
    return lambda rng: _Balanced(rule, rng)


def service(rng: random.Random) -> Routing:
    """Return the routing of a Service."""
    return _Balanced(random_pod, rng)


def random_pod(rng: random.Random, pods: list[Pod], _: float = 0.0) -> Pod:
    """Choose a random pod, as kube-proxy does with iptables or nftables."""
    return pods[int(rng.random() * len(pods))]


def least_loaded(rng: random.Random, pods: list[Pod], now: float) -> Pod:
    """Choose the less loaded of two random pods (Mitzenmacher, 2001), as a gateway that counts connections does."""
    one, other = random_pod(rng, pods), random_pod(rng, pods)
    return one if _load(one, now) <= _load(other, now) else other


def least_loaded_of_all(rng: random.Random, pods: list[Pod], now: float) -> Pod:
    """Choose the pod with the fewest requests in flight, as KubeAI's proxy and an endpoint picker do."""
    loads = [_load(pod, now) for pod in pods]
    least = min(loads)
    return random_pod(rng, [pod for pod, load in zip(pods, loads, strict=True) if load == least])


def _load(pod: Pod, now: float) -> int:
    """Return the requests in flight at `now`: a router sees each response end."""
    assert pod.replica is not None
    pod.replica.run_until(now)
    return pod.replica.in_flight


@dataclass(slots=True)
class Fleet:
    """A simulated Deployment; `schedule` runs a callback at a simulated time.

    `gpu_intervals` and `changes` record the GPU use of pods and the changes of the desired replicas.
    """

    engine: Engine
    cluster: Cluster
    make: MakeReplica
    log: RequestLog
    rng: random.Random
    routing: Routing
    schedule: Schedule
    pods: list[Pod] = field(default_factory=list)
    endpoints: list[Pod] = field(default_factory=list)
    desired_replicas: int = 0
    gpu_intervals: list[tuple[float, float]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    created: int = 0
    starts: list[float] = field(default_factory=list)

    def of(self, *states: State) -> list[Pod]:
        """Return the pods in the given states."""
        return [pod for pod in self.pods if pod.state in states]

    def begin(self, replicas: int) -> None:
        """Start the fleet with ready replicas."""
        self.scale(0.0, replicas)
        for pod in self.pods:
            if pod.state is State.STARTING:
                pod.created = pod.scheduled = -self.cluster.start(self.rng)
                self._ready(pod, 0.0)
                self._join(pod, 0.0)

    def scale(self, now: float, replicas: int) -> None:
        """Scale as the Deployment controller does: delete unready pods first, then those with the least load."""
        if replicas == self.desired_replicas:
            return
        self.changes.append((now, replicas))
        self.desired_replicas = replicas
        alive = self.of(State.PENDING, State.STARTING, State.READY)
        for _ in range(replicas - len(alive)):
            self.created += 1
            self.pods.append(Pod(str(self.created), now))
        order = (State.PENDING, State.STARTING, State.READY)
        alive.sort(key=lambda pod: (order.index(pod.state), _load(pod, now) if pod.replica else 0, -pod.created))
        for pod in alive[: max(0, len(alive) - replicas)]:
            self._delete(pod, now)
        self._schedule(now)

    def send(self, arrival: Arrival) -> None:
        """Send a request to the Service; it is rejected if there is no endpoint."""
        if not self.endpoints:
            self.log.lose(arrival)
            return
        replica = self.routing.choose(self.endpoints, arrival).replica
        assert replica is not None
        replica.run_until(arrival.time)
        replica.add(arrival)

    def run_until(self, now: float) -> None:
        """Advance all replicas to `now`."""
        for pod in self.pods:
            if pod.replica is not None:
                pod.replica.run_until(now)

    def close(self, now: float) -> None:
        """End the run: finish requests in flight, and count GPUs until `now`."""
        for pod in self.pods:
            if pod.replica is not None:
                pod.replica.drain(now + _DRAIN_SECONDS)
            if pod.state is not State.PENDING:
                self.gpu_intervals.append((pod.scheduled, now))
        self.pods.clear()

    def _schedule(self, now: float) -> None:
        free = self.cluster.gpus - len(self.of(State.STARTING, State.READY, State.DRAINING))
        for pod in self.of(State.PENDING)[: max(0, free)]:
            pod.state, pod.scheduled = State.STARTING, now
            self.schedule(now + self.cluster.start(self.rng), lambda time, pod=pod: self._started(pod, time))  # type: ignore[misc]

    def _started(self, pod: Pod, now: float) -> None:
        if pod.state is State.STARTING and int(pod.name) not in self.cluster.stuck:
            self.starts.append(now - pod.created)
            self._ready(pod, now)
            self.schedule(now + self.cluster.propagation, lambda time: self._join(pod, time))

    def _ready(self, pod: Pod, now: float) -> None:
        engine = self.engine
        if (factor := self.cluster.slow.get(int(pod.name))) is not None:
            engine = replace(engine, device=engine.device.slowed(factor))
        pod.state, pod.ready, pod.replica = State.READY, now, self.make(engine, self.log, now)

    def _join(self, pod: Pod, _: float) -> None:
        if pod.state is State.READY and pod not in self.endpoints:
            self.endpoints.append(pod)

    def _delete(self, pod: Pod, now: float) -> None:
        if pod.state is not State.READY:
            self._gone(pod, now)
            return
        pod.state, pod.deleted = State.DRAINING, now
        self.schedule(now + self.cluster.propagation, lambda _: self._leave(pod))
        self.schedule(now + self.cluster.pre_stop, lambda time: self._stop(pod, time))

    def _leave(self, pod: Pod) -> None:
        if pod in self.endpoints:
            self.endpoints.remove(pod)

    def _stop(self, pod: Pod, now: float) -> None:
        """Handle SIGTERM. No more requests arrive, so the outcome of the drain is known immediately."""
        assert pod.replica is not None
        pod.replica.run_until(now)
        ended = max(now, pod.replica.drain(now + self.cluster.drain))
        pod.replica = None
        self.schedule(ended, lambda time: self._gone(pod, time))

    def _gone(self, pod: Pod, now: float) -> None:
        if pod.state is not State.PENDING:
            self.gpu_intervals.append((pod.scheduled, now))
        pod.state = State.GONE
        self.pods.remove(pod)
        self._schedule(now)
