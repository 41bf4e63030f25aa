"""Estimate the demand on a fleet from the growth of its replicas' counters. Pure.

Throughput saturates at the fleet's capacity. The count of arriving prompt tokens does not, and it does not fall when
clients give up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fastgen_operator.autoscale.measure.averages import Average
from fastgen_operator.autoscale.measure.rates import Rates, ReplicaLoad, RequestSums, load_after
from fastgen_operator.autoscale.sample import MISSED_SCRAPES, Fleet

# Time constants of the averages: the slow one sizes the fleet, the fast one detects a jump.
SLOW_SECONDS: Final = 30.0
FAST_SECONDS: Final = 10.0


def arriving_tokens(rates: Rates) -> float:
    """Return the prompt tokens per second that arrive at a replica.

    Rejected clients retry, so rejected demand is capped at the admitted rate.
    """
    return rates.admitted + min(rates.rejected, rates.admitted)


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand on a fleet, in forward tokens per second.

    Attributes:
        replicas: load of each ready replica with a sample, by pod.
        first_seen: when each ready replica was first seen, by pod.
        slow, fast: arrival rate averaged over `SLOW_SECONDS` and `FAST_SECONDS`.
        requests: sums from which the mean request follows.
        time: time of the last update of the averages.
        rate: arrival rate since the scrape before, not averaged; None if the last scrape has measured none.
    """

    replicas: Mapping[str, ReplicaLoad]
    first_seen: Mapping[str, float]
    slow: Average = field(default_factory=lambda: Average(SLOW_SECONDS))
    fast: Average = field(default_factory=lambda: Average(FAST_SECONDS))
    requests: RequestSums = field(default_factory=RequestSums)
    time: float = -math.inf
    rate: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether an arrival rate was measured."""
        return self.slow.weight > 0

    def fresh(self, fleet: Fleet, now: float, scrape_seconds: float) -> tuple[dict[str, ReplicaLoad], int]:
        """Return the ready replicas with fresh samples, and how many replicas receive load.

        Replicas too new to have a sample are assumed to be idle.
        """
        oldest = now - MISSED_SCRAPES * scrape_seconds
        fresh = {
            name: load for name, load in self.replicas.items() if name in fleet.ready and load.sample.time >= oldest
        }
        new = sum(name not in self.replicas and self.first_seen[name] > oldest for name in fleet.ready)
        return fresh, len(fleet.ready) - new

    def observe(self, fleet: Fleet, now: float, scrape_seconds: float) -> Demand:
        """Return the demand updated with the fleet's newest samples."""
        # Sorted, so that floating-point sums and thus decisions can be repeated: each process orders a set differently.
        replicas = {
            name: load_after(self.replicas.get(name), fleet.samples[name])
            for name in sorted(fleet.ready)
            if name in fleet.samples
        }
        first_seen = {name: self.first_seen.get(name, now) for name in fleet.ready}
        after = Demand(replicas, first_seen, self.slow, self.fast, self.requests, self.time)
        loads, loaded = after.fresh(fleet, now, scrape_seconds)
        fresh = [load.rates for load in loads.values()]
        if not any(rates.seconds for rates in fresh):
            return after
        new = [load.rates for name, load in replicas.items() if self.replicas.get(name) is not load]
        requests = self.requests.add(new)
        # Replicas without a fresh sample are assumed to have the mean load of the others.
        arriving = sum(arriving_tokens(rates) for rates in fresh) * loaded / len(fresh)
        rate = arriving * requests.work_per_prompt_token
        seconds = now - self.time if self.is_known else scrape_seconds
        slow, fast = self.slow.add(rate, seconds), self.fast.add(rate, seconds)
        measured = rate if any(rates.seconds for rates in new) else None
        return Demand(replicas, first_seen, slow, fast, requests, now, measured)
