"""The compared policies and their settings: default ones, and ones tuned to the engine and the requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.policies.fastgen import Tokens
from benchmarks.autoscaling.policies.hpa import Behavior, WaitingRequests
from benchmarks.autoscaling.policies.knative import Concurrency
from benchmarks.autoscaling.policies.kubeai import ActiveRequests
from benchmarks.autoscaling.policies.llmd import Saturation, TokenCapacity
from benchmarks.autoscaling.replica import Arrival, Engine, RequestLog
from benchmarks.autoscaling.simulation import Policy
from benchmarks.autoscaling.traces import Mix
from fastgen_operator.autoscale.policy import Policy as Rules

_TRIAL, _SAMPLE_SECONDS, _HALVINGS, _SHARE = 300.0, 1.0, 9, 0.99


@dataclass(frozen=True, slots=True)
class PolicyConfiguration:
    """A policy with its settings.

    Attributes:
        family: the system that the policy belongs to.
        tuned: whether the settings use knowledge of the simulated engine and requests.
        make: creates a new instance without state.
    """

    family: str
    setting: str
    tuned: bool
    make: Callable[[], Policy]

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.family}, {self.setting}"


def in_flight_at_limit(engine: Engine, mix: Mix, seed: int = 7) -> float:
    """Return the mean requests in flight of one replica at the highest Poisson load that meets the targets.

    The target is met if 99 % of the first tokens are in time. This is the ideal setting for policies that scale on
    requests per replica.
    """
    low, high, found = 0.0, 256.0, 1.0
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        attained, in_flight = _trial(engine, mix, rate, seed)
        if attained >= _SHARE:
            low, found = rate, in_flight
        else:
            high = rate
    return max(1.0, found)


def _trial(engine: Engine, mix: Mix, rate: float, seed: int) -> tuple[float, float]:
    rng, log = random.Random(seed), RequestLog()
    replica = ApproximateReplica(engine, log, 0.0)
    now, sample_at, samples = rng.expovariate(rate), 0.0, []
    while now < _TRIAL and replica.in_flight < 2000:
        while sample_at < now:
            replica.run_until(sample_at)
            samples.append(replica.in_flight)
            sample_at += _SAMPLE_SECONDS
        replica.run_until(now)
        replica.add(Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng)))
        now += rng.expovariate(rate)
    replica.drain(now + 10 * _TRIAL)
    met = sum(first - arrival <= engine.targets.first_token for arrival, first, _, _ in log.served)
    return met / max(1, len(log.served) + len(log.lost)), sum(samples) / max(1, len(samples))


def policy_configurations(engine: Engine, mix: Mix, most: int) -> tuple[PolicyConfiguration, ...]:
    """Return all policies for one trace; `most` is the maximum number of replicas."""
    limit = in_flight_at_limit(engine, mix)

    def ours(utilization: float) -> Tokens:
        return Tokens(
            Rules(
                min_replicas=1,
                max_replicas=most,
                first_token_seconds=engine.targets.first_token,
                inter_token_seconds=engine.targets.gap,
                max_sequences=engine.device.max_sequences,
                utilization=utilization,
            )
        )

    def quick() -> Behavior:
        return Behavior(up=0.0, down=300.0)

    return (
        PolicyConfiguration("FastGen", "default (85 %)", False, lambda: ours(0.85)),
        PolicyConfiguration("FastGen", "utilization 70 %", False, lambda: ours(0.70)),
        PolicyConfiguration("FastGen", "utilization 60 %", False, lambda: ours(0.60)),
        PolicyConfiguration("FastGen", "utilization 50 %", False, lambda: ours(0.50)),
        PolicyConfiguration("HPA on waiting", "5, default", False, lambda: WaitingRequests(5.0)),
        PolicyConfiguration("HPA on waiting", "1", True, lambda: WaitingRequests(1.0)),
        PolicyConfiguration("Knative", "70 in flight, default", False, lambda: Concurrency(70.0)),
        PolicyConfiguration("Knative", f"{0.7 * limit:.1f} in flight", True, lambda: Concurrency(0.7 * limit)),
        PolicyConfiguration("Knative", f"{0.35 * limit:.1f} in flight", True, lambda: Concurrency(0.35 * limit)),
        PolicyConfiguration("KubeAI", "100 in flight, default", False, lambda: ActiveRequests(100.0)),
        PolicyConfiguration("KubeAI", f"{limit:.1f} in flight", True, lambda: ActiveRequests(limit)),
        PolicyConfiguration("KubeAI", f"{0.7 * limit:.1f} in flight", True, lambda: ActiveRequests(0.7 * limit)),
        PolicyConfiguration("llm-d V1", "as documented", False, Saturation),
        PolicyConfiguration("llm-d V1", "15 s, up at once", True, lambda: Saturation(15.0, quick())),
        PolicyConfiguration("llm-d V2", "as documented", False, TokenCapacity),
        PolicyConfiguration(
            "llm-d V2", "15 s, up at once, 60 / 50 %", True, lambda: TokenCapacity(15.0, 0.60, 0.50, quick())
        ),
    )
