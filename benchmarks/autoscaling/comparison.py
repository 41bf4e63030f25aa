"""Run all policies on all traces with several seeds, and compare them at equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.configurations import (
    CLAIRVOYANT,
    CONSTANT,
    OURS,
    PolicyConfiguration,
    limits_of,
    policy_configurations,
)
from benchmarks.autoscaling.replica import Engine, MakeReplica
from benchmarks.autoscaling.results import Figures, Interval, figures, interval
from benchmarks.autoscaling.scenarios import SITUATIONS, Situation, cluster_of
from benchmarks.autoscaling.simulation import FleetSample, Scenario, simulate
from benchmarks.autoscaling.traces import Trace

MOST_REPLICAS: Final = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace: a row of the results table.

    Attributes:
        runs: one for each seed.
        samples: of the first seed's run, for the plots.
    """

    trace: Trace
    configuration: PolicyConfiguration
    runs: tuple[Figures, ...]
    samples: tuple[FleetSample, ...]

    @property
    def attainment(self) -> Interval:
        """Share of the requests in time."""
        return interval([run.attainment for run in self.runs])

    @property
    def gpu_hours(self) -> Interval:
        """GPU-hours."""
        return interval([run.gpu_hours for run in self.runs])


def compare(
    engine: Engine,
    traces: Sequence[Trace],
    *,
    seeds: Sequence[int] = (1,),
    start: float = 60.0,
    situation: Situation = SITUATIONS[0],
    begin: int = 2,
    most: int = MOST_REPLICAS,
    make: MakeReplica = ApproximateReplica,
    only: Sequence[str] = (),
) -> Iterator[Row]:
    """Run every policy, or those whose names start with one of `only`, on every trace with identical requests."""
    for trace in traces:
        configurations = policy_configurations(engine, limits_of(engine, trace.mix), start, most)
        for configuration in configurations:
            if only and not configuration.name.startswith(tuple(only)):
                continue
            scenario = Scenario(
                trace=trace,
                engine=situation.engine(engine),
                cluster=cluster_of(situation, start),
                begin=begin,
                most=most,
                balancer=configuration.balancer,
            )
            runs: list[Figures] = []
            samples: tuple[FleetSample, ...] = ()
            for seed in seeds:
                seeded = replace(scenario, seed=seed)
                run = simulate(seeded, configuration.make(seeded), make)
                runs.append(figures(run))
                samples = samples or run.samples
            yield Row(trace, configuration, tuple(runs), samples)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our default on one trace, compared at its cost.

    Attributes:
        ours: our default.
        rival: the best row of another system at no more GPU-hours; None if all cost more.
        constant, clairvoyant: attainment of the baselines at our GPU-hours, interpolated.
    """

    trace: Trace
    ours: Row
    rival: Row | None
    constant: float | None
    clairvoyant: float | None

    @property
    def way(self) -> float | None:
        """How far we are from the constant fleet, 0, to the clairvoyant one, 1."""
        if self.constant is None or self.clairvoyant is None or self.clairvoyant <= self.constant:
            return None
        return (self.ours.attainment.mean - self.constant) / (self.clairvoyant - self.constant)


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Yield the verdict of each trace on which our default ran."""
    for trace in dict.fromkeys(row.trace for row in rows):
        here = [row for row in rows if row.trace is trace]
        ours = next((row for row in here if row.configuration.family == OURS), None)
        if ours is None:
            continue
        hours = ours.gpu_hours.mean
        rivals = [row for row in here if row.configuration.is_rival and row.gpu_hours.mean <= hours]
        yield Verdict(
            trace,
            ours,
            max(rivals, key=lambda row: row.attainment.mean, default=None),
            at_cost([row for row in here if row.configuration.family == CONSTANT], hours),
            at_cost([row for row in here if row.configuration.family == CLAIRVOYANT], hours),
        )


def at_cost(rows: Sequence[Row], hours: float) -> float | None:
    """Return the best attainment at most at that cost, interpolated between rows; None if all cost more."""
    points = sorted((row.gpu_hours.mean, row.attainment.mean) for row in rows)
    found = [attained for cost, attained in points if cost <= hours]
    if not found:
        return None
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= hours < right:
            found.append(low + (high - low) * (hours - left) / (right - left))
    return max(found)
