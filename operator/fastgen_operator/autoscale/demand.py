"""Estimate the demand on a fleet from the growth of its replicas' counters. Pure.

Throughput counters saturate at the fleet's capacity. The arrival rate is the throughput plus the growth of the backlog,
which does not saturate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale.averages import Average
from fastgen_operator.autoscale.capacity import DEFAULT_SHAPE, RequestShape
from fastgen_operator.autoscale.observation import MISSED_SCRAPES, Fleet, Sample

# Time constants of the averages: one for sizing the fleet, one for detecting a sudden jump.
SLOW_SECONDS: Final = 30.0
FAST_SECONDS: Final = 10.0
# The mean request is averaged over about this many finished requests.
_REQUEST_MEMORY: Final = 200
# Throughput is taken as the capacity while more than this many full steps are queued: with fewer, the engine shortens
# steps to keep its latency (docs/decisions/005).
_BACKLOG_STEPS: Final = 8
# Throughput under a backlog: time constant of its average, and seconds until it expires.
_THROUGHPUT_SECONDS: Final = 60.0
_THROUGHPUT_EXPIRY: Final = 600.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one replica between two scrapes, in tokens per second unless noted.

    Attributes:
        seconds: length of the interval; 0 for a replica's first sample.
        arriving: prompt tokens that arrived, whether computed, cached or still queued.
        computed: prompt tokens computed; `cached`: taken from the prefix cache; `decoded`: tokens generated.
        rejected: rejected requests per second.
        ended, ended_prompt, ended_generated: finished requests in the interval, and their tokens (totals, not rates).
        backlogged: whether a backlog existed throughout the interval.
    """

    seconds: float
    arriving: float
    computed: float
    cached: float
    decoded: float
    rejected: float
    ended: float
    ended_prompt: float
    ended_generated: float
    backlogged: bool


# Rates of a replica with a single sample.
_IDLE: Final = Rates(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The newest sample of one replica, and its rates in the interval before it."""

    sample: Sample
    rates: Rates


@dataclass(frozen=True, slots=True)
class RequestSums:
    """Exponentially weighted sums over finished requests, from which the mean request is derived."""

    ended: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0
    computed: float = 0.0
    cached: float = 0.0

    def add(self, intervals: Iterable[Rates]) -> RequestSums:
        """Return the sums with the requests that finished in the given intervals."""
        intervals = tuple(intervals)
        ended = sum(rates.ended for rates in intervals)
        keep = math.exp(-ended / _REQUEST_MEMORY)
        return RequestSums(
            self.ended * keep + ended,
            self.prompt * keep + sum(rates.ended_prompt for rates in intervals),
            self.generated * keep + sum(rates.ended_generated for rates in intervals),
            self.computed * keep + sum(rates.computed * rates.seconds for rates in intervals),
            self.cached * keep + sum(rates.cached * rates.seconds for rates in intervals),
        )

    @property
    def mean(self) -> RequestShape:
        """The mean request; a default until one has finished."""
        if self.ended <= 0 or self.prompt <= 0:
            return DEFAULT_SHAPE
        prompt = self.prompt / self.ended
        return RequestShape(prompt * self.computed_share, prompt, self.generated / self.ended)

    @property
    def computed_share(self) -> float:
        """Share of the prompt tokens that is computed, not taken from the prefix cache."""
        known = self.computed + self.cached
        return self.computed / known if known > 0 else 1.0

    @property
    def work_per_prompt_token(self) -> float:
        """Forward tokens per prompt token: its computed share, plus the generated tokens per prompt token."""
        shape = self.mean
        return self.computed_share + shape.generated / shape.prompt


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand on a fleet, in forward tokens per second.

    Attributes:
        replicas: load of the ready replicas that have returned a sample, by pod.
        first_seen: time at which each ready replica was first seen, by pod.
        slow, fast: arrival rate averaged over `SLOW_SECONDS` and `FAST_SECONDS`.
        requests: sums over finished requests.
        throughput: average throughput of a replica with a backlog; `throughput_at`: time of its last update.
        time: time of the last update of the averages.
    """

    replicas: Mapping[str, ReplicaLoad]
    first_seen: Mapping[str, float]
    slow: Average = field(default_factory=lambda: Average(SLOW_SECONDS))
    fast: Average = field(default_factory=lambda: Average(FAST_SECONDS))
    requests: RequestSums = field(default_factory=RequestSums)
    throughput: Average = field(default_factory=lambda: Average(_THROUGHPUT_SECONDS))
    throughput_at: float = -math.inf
    time: float = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether an arrival rate has been measured."""
        return self.slow.weight > 0

    def observed_throughput(self, now: float) -> float | None:
        """Return the throughput of one replica under a backlog; None if there was none recently."""
        return self.throughput.value if now - self.throughput_at < _THROUGHPUT_EXPIRY else None

    def fresh(self, fleet: Fleet, now: float, scrape_seconds: float) -> dict[str, ReplicaLoad]:
        """Return the ready replicas whose samples are not stale."""
        oldest = now - MISSED_SCRAPES * scrape_seconds
        return {
            name: load for name, load in self.replicas.items() if name in fleet.ready and load.sample.time >= oldest
        }

    def num_new(self, fleet: Fleet, now: float, scrape_seconds: float) -> int:
        """Return the number of replicas too new to have a sample. They are assumed to be idle."""
        latest = now - MISSED_SCRAPES * scrape_seconds
        return sum(name not in self.replicas and self.first_seen[name] > latest for name in fleet.ready)

    def observe(self, fleet: Fleet, now: float, scrape_seconds: float) -> Demand:
        """Return the demand updated with the fleet's newest samples."""
        replicas = {
            name: _load(self.replicas.get(name), fleet.samples[name]) for name in fleet.ready if name in fleet.samples
        }
        first_seen = {name: self.first_seen.get(name, now) for name in fleet.ready}
        after = replace(self, replicas=replicas, first_seen=first_seen)
        fresh = [load.rates for load in after.fresh(fleet, now, scrape_seconds).values()]
        if not any(rates.seconds for rates in fresh):
            return after
        new = [load.rates for name, load in replicas.items() if self.replicas.get(name) is not load]
        requests = self.requests.add(new)
        # Replicas without a fresh sample are assumed to have the mean load of the others.
        loaded = len(fleet.ready) - after.num_new(fleet, now, scrape_seconds)
        arriving = sum(_arriving(rates, requests) for rates in fresh) * loaded / len(fresh)
        rate = max(0.0, arriving) * requests.work_per_prompt_token
        seconds = now - self.time if self.is_known else scrape_seconds
        after = replace(
            after, slow=self.slow.add(rate, seconds), fast=self.fast.add(rate, seconds), requests=requests, time=now
        )
        return _observe_throughput(after, [rates for rates in new if rates.backlogged], now)


def _observe_throughput(demand: Demand, backlogged: list[Rates], now: float) -> Demand:
    if not backlogged:
        return demand
    mean = sum(rates.computed + rates.decoded for rates in backlogged) / len(backlogged)
    throughput = demand.throughput.add(mean, max(rates.seconds for rates in backlogged))
    return replace(demand, throughput=throughput, throughput_at=now)


def _load(before: ReplicaLoad | None, sample: Sample) -> ReplicaLoad:
    if before is None:
        return ReplicaLoad(sample, _IDLE)
    if sample.time <= before.sample.time:
        return before
    return ReplicaLoad(sample, rates_between(before.sample, sample))


def rates_between(before: Sample, after: Sample) -> Rates:
    """Return the rates between two samples of one replica. Counters that decreased mean an engine restart."""
    restarted = after.prefill_tokens < before.prefill_tokens or after.decode_tokens < before.decode_tokens
    start = Sample(time=before.time) if restarted else before
    seconds = after.time - before.time

    def growth(counter: str) -> float:
        return max(0.0, float(getattr(after, counter)) - float(getattr(start, counter)))

    computed, cached = growth("prefill_tokens"), growth("cached_tokens")
    enough = _BACKLOG_STEPS * after.token_budget
    return Rates(
        seconds=seconds,
        arriving=(computed + cached + after.backlog_tokens - start.backlog_tokens) / seconds,
        computed=computed / seconds,
        cached=cached / seconds,
        decoded=growth("decode_tokens") / seconds,
        rejected=growth("rejected_requests") / seconds,
        ended=growth("ended_requests"),
        ended_prompt=growth("ended_prompt_tokens"),
        ended_generated=growth("ended_generated_tokens"),
        backlogged=0 < enough < min(before.backlog_tokens, after.backlog_tokens),
    )


def _arriving(rates: Rates, requests: RequestSums) -> float:
    """Return the arriving prompt tokens per second, rejected requests included.

    Rejected clients retry, so rejected demand is capped at the admitted rate.
    """
    rejected = rates.rejected * requests.mean.prompt
    return rates.arriving + min(rejected, max(0.0, rates.arriving))
