"""The compared policies: their defaults, a sweep of each one's own parameter, and two baselines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.fleet import MakeRouting, balanced, least_loaded, least_loaded_of_all, service
from benchmarks.autoscaling.policies.clairvoyant import clairvoyant
from benchmarks.autoscaling.policies.fastgen import Operator
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.policies.hpa import Behavior, WaitingRequests
from benchmarks.autoscaling.policies.knative import Concurrency
from benchmarks.autoscaling.policies.kubeai import ActiveRequests
from benchmarks.autoscaling.policies.llmd import Saturation, TokenCapacity
from benchmarks.autoscaling.replica import Arrival, Engine, RequestLog
from benchmarks.autoscaling.simulation import Policy, Scenario
from benchmarks.autoscaling.traces import Mix

OURS, CONSTANT, CLAIRVOYANT = "FastGen", "Constant fleet", "Clairvoyant"
# Families that no one can run: they know the trace.
BASELINES = (CONSTANT, CLAIRVOYANT)

_TRIAL, _SAMPLE_SECONDS, _HALVINGS, _SHARE = 300.0, 1.0, 9, 0.99
# A replica that has this share of the first tokens in time keeps up with its load.
_KEEPS_UP = 0.5
# Multiples of the in-flight limit to which policies on requests per replica are set.
_IN_FLIGHT = (1.4, 1.0, 0.7, 0.5, 0.35)
_CLAIRVOYANT = (1.0, 0.85, 0.7, 0.55, 0.4)


@dataclass(frozen=True, slots=True)
class PolicyConfiguration:
    """A policy with its settings.

    Attributes:
        family: the system that the policy belongs to.
        tuned: whether the settings use knowledge of the simulated engine and requests.
        make: creates a new instance without state, for one scenario.
        routing: how the system routes requests, if it ships a router; else as the Service does.
    """

    family: str
    setting: str
    tuned: bool
    make: Callable[[Scenario], Policy]
    routing: MakeRouting = service

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.family}, {self.setting}"

    @property
    def is_rival(self) -> bool:
        """Whether it is another system's policy."""
        return self.family != OURS and self.family not in BASELINES

    @property
    def is_swept(self) -> bool:
        """Whether it is one of several settings of which the best is known only afterwards."""
        if self.family == OURS:
            return not self.setting.startswith("default")
        return self.tuned and self.is_rival


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica can serve of a mix of requests, within the targets.

    Attributes:
        in_flight: mean requests in flight at the highest Poisson load for which 99 % of the first tokens are in time:
            the ideal setting for policies that scale on requests per replica.
        tokens_per_second: forward tokens per second at a load that the replica still keeps up with.
    """

    in_flight: float
    tokens_per_second: float


@lru_cache
def limits_of(engine: Engine, mix: Mix, seed: int = 7) -> Limits:
    """Measure the limits by bisection over the request rate."""

    low, high, in_flight, tokens = 0.0, 256.0, 1.0, 1.0
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        trial = _trial(engine, mix, rate, seed)
        if trial.in_time >= _SHARE:
            low, in_flight = rate, trial.in_flight
        else:
            high = rate
        if trial.in_time >= _KEEPS_UP:
            tokens = max(tokens, trial.tokens_per_second)
    return Limits(max(1.0, in_flight), tokens)


@dataclass(frozen=True, slots=True)
class _Trial:
    """One replica at a Poisson load: share of first tokens in time, mean requests in flight, offered tokens/s."""

    in_time: float
    in_flight: float
    tokens_per_second: float


def _trial(engine: Engine, mix: Mix, rate: float, seed: int) -> _Trial:
    rng, log = random.Random(seed), RequestLog()
    replica = ApproximateReplica(engine, log, 0.0)
    now, sample_at, samples, tokens = rng.expovariate(rate), 0.0, list[int](), 0
    while now < _TRIAL and replica.in_flight < 2000:
        while sample_at < now:
            replica.run_until(sample_at)
            samples.append(replica.in_flight)
            sample_at += _SAMPLE_SECONDS
        replica.run_until(now)
        arrival = Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng))
        tokens += arrival.prompt + arrival.generate
        replica.add(arrival)
        now += rng.expovariate(rate)
    replica.drain(now + 10 * _TRIAL)
    met = sum(first - arrival <= engine.targets.first_token for arrival, first, _, _ in log.served)
    in_flight = sum(samples) / max(1, len(samples))
    return _Trial(met / max(1, len(log.served) + len(log.lost)), in_flight, tokens / max(now, 1e-9))


def policy_configurations(engine: Engine, limits: Limits, start: float, most: int) -> tuple[PolicyConfiguration, ...]:
    """Return all policies for one trace.

    Args:
        limits: of one replica for the trace's requests.
        start: mean start time of a pod in seconds.
        most: maximum number of replicas.
    """

    def ours(percent: int | None = None, learning: str = "Advise", attained: int = 99) -> Callable[[Scenario], Policy]:
        targets = {
            "timeToFirstTokenMilliseconds": round(1000 * engine.targets.first_token),
            "interTokenLatencyMilliseconds": round(1000 * engine.targets.gap),
            "utilizationPercent": percent,
            "attainmentPercent": attained,
        }
        spec = {"device": "cuda", "maxSequences": engine.device.max_sequences}
        return lambda _: Operator({"maxReplicas": most, "targets": targets, "learning": learning}, spec)

    def knows(utilization: float) -> Callable[[Scenario], Policy]:
        # The longest start, one second until the Service knows of the pod, and a drain of about half a minute.
        return lambda scenario: clairvoyant(
            scenario.trace.arrivals(scenario.seed),
            limits.tokens_per_second,
            utilization,
            start * 7 / 6 + 1,
            start + 30,
            seconds=scenario.trace.seconds,
            most=most,
        )

    def constant(replicas: int) -> Callable[[Scenario], Policy]:
        return lambda _: Fixed(replicas)

    def knative(target: float) -> Callable[[Scenario], Policy]:
        return lambda _: Concurrency(target)

    def kubeai(target: float) -> Callable[[Scenario], Policy]:
        return lambda _: ActiveRequests(target)

    def waiting(threshold: float) -> Callable[[Scenario], Policy]:
        return lambda _: WaitingRequests(threshold)

    def quick() -> Behavior:
        return Behavior(up=0.0, down=300.0)

    def llmd(up: float, down: float) -> Callable[[Scenario], Policy]:
        return lambda _: TokenCapacity(15.0, up, down, quick())

    fleets = range(max(1, most // 8), max(4, 5 * most // 8) + 1)
    make, of_two, by_load = PolicyConfiguration, balanced(least_loaded), balanced(least_loaded_of_all)
    in_flight = [share * limits.in_flight for share in _IN_FLIGHT]
    return (
        make(OURS, "default", False, ours()),
        make(OURS, "default, least loaded of two", False, ours(), of_two),
        *(make(OURS, f"utilization {percent} %", False, ours(percent)) for percent in (85, 70, 60, 50)),
        *(make(OURS, f"learning, {share} % in time", False, ours(None, "Apply", share)) for share in (99, 97)),
        make("HPA on waiting", "5, default", False, waiting(5.0)),
        *(make("HPA on waiting", f"{threshold:g}", True, waiting(threshold)) for threshold in (2.0, 1.0)),
        make("Knative", "70 in flight, default", False, knative(70.0), of_two),
        *(make("Knative", f"{target:.1f} in flight", True, knative(target), of_two) for target in in_flight),
        make("KubeAI", "100 in flight, default", False, kubeai(100.0), by_load),
        *(make("KubeAI", f"{target:.1f} in flight", True, kubeai(target), by_load) for target in in_flight),
        make("llm-d V1", "as documented", False, lambda _: Saturation(), by_load),
        make("llm-d V1", "15 s, up at once", True, lambda _: Saturation(15.0, quick()), by_load),
        make("llm-d V2", "as documented", False, lambda _: TokenCapacity(), by_load),
        *(
            make("llm-d V2", f"15 s, up at once, {up} / {up - 10} %", True, llmd(up / 100, up / 100 - 0.1), by_load)
            for up in (85, 70, 60, 50)
        ),
        *(make(CONSTANT, f"{replicas}", True, constant(replicas)) for replicas in fleets),
        *(make(CLAIRVOYANT, f"{100 * share:.0f} %", True, knows(share)) for share in _CLAIRVOYANT),
    )
