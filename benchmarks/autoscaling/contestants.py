"""Who is compared, with which settings: as other systems come, and tuned to the engine and the requests at hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.autoscaling.coarse import CoarseReplica
from benchmarks.autoscaling.policies.fastgen import Tokens
from benchmarks.autoscaling.policies.hpa import Behavior, WaitingRequests
from benchmarks.autoscaling.policies.knative import Concurrency
from benchmarks.autoscaling.policies.kubeai import ActiveRequests
from benchmarks.autoscaling.policies.llmd import Saturation, TokenCapacity
from benchmarks.autoscaling.replica import Arrival, Engine, Ledger
from benchmarks.autoscaling.simulation import Policy
from benchmarks.autoscaling.traces import Mix
from fastgen_operator.autoscale.policy import Policy as Rules

_TRIAL, _LOOK, _HALVINGS, _SHARE = 300.0, 1.0, 9, 0.99


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy with its settings; `make` makes a new one, which has seen nothing.

    `family`: the system that it is of; `tuned`: was it told what the simulator knows of engine and requests?
    """

    family: str
    setting: str
    tuned: bool
    make: Callable[[], Policy]

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.family}, {self.setting}"


def in_flight_at_limit(engine: Engine, mix: Mix, seed: int = 7) -> float:
    """Requests in flight, on average, of one replica under the most Poisson load that it answers in time.

    In time: 99 % of the first tokens within their target. It is what a target of requests for each replica should be.
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
    rng, ledger = random.Random(seed), Ledger()
    replica = CoarseReplica(engine, ledger, 0.0)
    now, look, looks = rng.expovariate(rate), 0.0, []
    while now < _TRIAL and replica.in_flight < 2000:
        while look < now:
            replica.run_until(look)
            looks.append(replica.in_flight)
            look += _LOOK
        replica.run_until(now)
        replica.add(Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng)))
        now += rng.expovariate(rate)
    replica.drain(now + 10 * _TRIAL)
    met = sum(first - arrival <= engine.targets.first_token for arrival, first, _, _ in ledger.served)
    return met / max(1, len(ledger.served) + len(ledger.lost)), sum(looks) / max(1, len(looks))


def contestants(engine: Engine, mix: Mix, most: int) -> tuple[Contestant, ...]:
    """All, for one trace; `most` is the bound on replicas, which ours is told as a user would."""
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
        Contestant("FastGen", "as it comes (85 %)", False, lambda: ours(0.85)),
        Contestant("FastGen", "utilization 70 %", False, lambda: ours(0.70)),
        Contestant("FastGen", "utilization 60 %", False, lambda: ours(0.60)),
        Contestant("FastGen", "utilization 50 %", False, lambda: ours(0.50)),
        Contestant("HPA on waiting", "5, as usual", False, lambda: WaitingRequests(5.0)),
        Contestant("HPA on waiting", "1", True, lambda: WaitingRequests(1.0)),
        Contestant("Knative", "70 in flight, as it comes", False, lambda: Concurrency(70.0)),
        Contestant("Knative", f"{0.7 * limit:.1f} in flight", True, lambda: Concurrency(0.7 * limit)),
        Contestant("Knative", f"{0.35 * limit:.1f} in flight", True, lambda: Concurrency(0.35 * limit)),
        Contestant("KubeAI", "100 in flight, as it comes", False, lambda: ActiveRequests(100.0)),
        Contestant("KubeAI", f"{limit:.1f} in flight", True, lambda: ActiveRequests(limit)),
        Contestant("KubeAI", f"{0.7 * limit:.1f} in flight", True, lambda: ActiveRequests(0.7 * limit)),
        Contestant("llm-d V1", "as documented", False, Saturation),
        Contestant("llm-d V1", "15 s, up at once", True, lambda: Saturation(15.0, quick())),
        Contestant("llm-d V2", "as documented", False, TokenCapacity),
        Contestant("llm-d V2", "15 s, up at once, 60 / 50 %", True, lambda: TokenCapacity(15.0, 0.60, 0.50, quick())),
    )
