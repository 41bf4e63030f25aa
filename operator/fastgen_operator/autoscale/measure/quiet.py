"""Since when the replicas of a fleet have had no work, by their metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastgen_operator.autoscale.measure.rates import ReplicaLoad
from fastgen_operator.autoscale.sample import Fleet, Sample


@dataclass(frozen=True, slots=True)
class Quiet:
    """A time without work.

    Attributes:
        since: when all replicas were first seen without work; infinite while one may have some.
        counts: what each replica had counted until then, by pod.
    """

    since: float = math.inf
    counts: Mapping[str, float] = field(default_factory=dict)

    def observe(self, fleet: Fleet, fresh: Mapping[str, ReplicaLoad], now: float) -> Quiet:
        """Return the state after the newest samples.

        Args:
            fresh: replicas with a fresh sample. If one of the ready ones has none, it may have work.
        """
        samples = {pod: load.sample for pod, load in fresh.items()}
        if not samples or samples.keys() != fleet.ready or any(_in_flight(sample) for sample in samples.values()):
            return Quiet()
        counts = {pod: _counted(sample) for pod, sample in samples.items()}
        # Equal counts: no request came and went between two samples, also if scrapes between them have failed.
        return Quiet(self.since if counts == self.counts and self.since <= now else now, counts)


def _in_flight(sample: Sample) -> float:
    return sample.running + sample.waiting + sample.backlog_tokens


def _counted(sample: Sample) -> float:
    """Return a number that grows with each request, admitted or rejected, and each step."""
    arrived = sample.arrived_tokens + sample.rejected_tokens + sample.ended_requests
    return arrived + sample.prefill_tokens + sample.decode_tokens
