"""Run all policies on all traces with several seeds, and compare them at equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.configurations import (
    BASELINES,
    CLAIRVOYANT,
    CONSTANT,
    OURS,
    PolicyConfiguration,
    limits_of,
    policy_configurations,
)
from benchmarks.autoscaling.pool import Store, run_all
from benchmarks.autoscaling.replica import Engine, MakeReplica
from benchmarks.autoscaling.results import Figures, Interval, figures, interval
from benchmarks.autoscaling.scenarios import SITUATIONS, Situation, cluster_of
from benchmarks.autoscaling.simulation import Run, Scenario, simulate
from benchmarks.autoscaling.traces import Trace

MOST_REPLICAS: Final = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace: a row of the results table; `runs` has one entry for each seed."""

    trace: Trace
    configuration: PolicyConfiguration
    runs: tuple[Figures, ...]

    def first(self, seeds: int) -> Row:
        """Return the row with its first runs only: rows are comparable over the same seeds."""
        return Row(self.trace, self.configuration, self.runs[:seeds])

    @property
    def attainment(self) -> Interval:
        """Share of the requests in time."""
        return interval([run.attainment for run in self.runs])

    @property
    def gpu_hours(self) -> Interval:
        """GPU-hours."""
        return interval([run.gpu_hours for run in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to compare, and under which conditions.

    Attributes:
        seeds: runs of our default, the others' defaults and the baselines.
        sweep_seeds: runs of each setting that is only known afterwards to be good.
        start: mean seconds from a GPU to a ready pod.
        only: prefixes of the policies to run; all if empty.
    """

    engine: Engine
    traces: Sequence[Trace]
    seeds: int = 1
    sweep_seeds: int = 1
    start: float = 60.0
    situation: Situation = SITUATIONS[0]
    begin: int = 2
    most: int = MOST_REPLICAS
    make: MakeReplica = ApproximateReplica
    only: Sequence[str] = ()

    def configurations(self, trace: Trace) -> list[PolicyConfiguration]:
        """Return the policies to run on a trace."""
        limits = limits_of(self.engine, trace.mix)
        return [
            configuration
            for configuration in policy_configurations(self.engine, limits, self.start, self.most)
            if not self.only or configuration.name.startswith(tuple(self.only))
        ]

    def num_seeds(self, configuration: PolicyConfiguration) -> int:
        """Return the number of runs of a policy on each trace."""
        return self.sweep_seeds if configuration.is_swept else self.seeds

    def simulate(self, trace: Trace, configuration: PolicyConfiguration, seed: int) -> Run:
        """Run a policy on a trace. All policies get identical requests for a seed."""
        scenario = Scenario(
            trace=trace,
            engine=self.situation.engine(self.engine),
            cluster=cluster_of(self.situation, self.start),
            begin=self.begin,
            most=self.most,
            routing=configuration.routing,
            seed=seed,
        )
        return simulate(scenario, configuration.make(scenario), self.make)


def compare(grid: Grid, store: Store, jobs: int) -> list[Row]:
    """Run what the store lacks, in `jobs` processes, and return a row for each trace and policy."""

    def task(trace: Trace, configuration: PolicyConfiguration, seed: int) -> Callable[[], Figures]:
        return lambda: figures(grid.simulate(trace, configuration, seed))

    # Runs of one trace and seed follow each other, so that a process generates the requests once for some of them.
    tasks = [
        ((trace.name, configuration.name, seed), task(trace, configuration, seed))
        for trace in grid.traces
        for configurations in [grid.configurations(trace)]
        for seed in range(1, max(grid.seeds, grid.sweep_seeds) + 1)
        for configuration in configurations
        if seed <= grid.num_seeds(configuration)
    ]
    run_all(tasks, store, jobs)
    return stored(grid, store)


def stored(grid: Grid, store: Store) -> list[Row]:
    """Return a row for each trace and policy of which the store has the first seed; run nothing."""
    rows = []
    for trace in grid.traces:
        for configuration in grid.configurations(trace):
            runs: list[Figures] = []
            while (run := store.runs.get((trace.name, configuration.name, len(runs) + 1))) is not None:
                runs.append(run)
            if runs:
                rows.append(Row(trace, configuration, tuple(runs)))
    return rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our default on one trace, compared at its cost.

    Attributes:
        ours: our default.
        rival: the row of another system that is furthest ahead at no more GPU-hours; None if all cost more.
        paired: our default with the seeds that `rival` has.
        same: our default with the seeds that the baselines have.
        constant, clairvoyant: attainment of the baselines at the GPU-hours of `same`, interpolated.
    """

    trace: Trace
    ours: Row
    paired: Row
    rival: Row | None
    same: Row
    constant: float | None
    clairvoyant: float | None

    @property
    def way(self) -> float | None:
        """How far we are from the constant fleet, 0, to the clairvoyant one, 1."""
        if self.constant is None or self.clairvoyant is None or self.clairvoyant <= self.constant:
            return None
        return (self.same.attainment.mean - self.constant) / (self.clairvoyant - self.constant)


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Yield the verdict of each trace on which our default ran."""
    for trace in dict.fromkeys(row.trace for row in rows):
        here = [row for row in rows if row.trace is trace]
        ours = next((row for row in here if row.configuration.family == OURS), None)
        if ours is None:
            continue
        baselines = [row for row in here if row.configuration.family in BASELINES]
        same = ours.first(min((len(row.runs) for row in baselines), default=len(ours.runs)))
        baselines = [row.first(len(same.runs)) for row in baselines]
        hours = same.gpu_hours.mean
        others = [row for row in here if row.configuration.is_rival]
        pairs = [
            (row.first(seeds), ours.first(seeds)) for row in others for seeds in [min(len(row.runs), len(ours.runs))]
        ]
        cheaper = [(row, paired) for row, paired in pairs if row.gpu_hours.mean <= paired.gpu_hours.mean]
        rival, paired = max(cheaper, key=lambda pair: _lead(*pair), default=(None, ours))
        yield Verdict(
            trace,
            ours,
            paired,
            rival,
            same,
            at_cost([row for row in baselines if row.configuration.family == CONSTANT], hours),
            at_cost([row for row in baselines if row.configuration.family == CLAIRVOYANT], hours),
        )


def _lead(row: Row, paired: Row) -> float:
    return row.attainment.mean - paired.attainment.mean


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
