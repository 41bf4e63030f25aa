"""Run all policies on all traces and rank the results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.configurations import PolicyConfiguration, policy_configurations
from benchmarks.autoscaling.fleet import Balancer, Cluster, random_pod
from benchmarks.autoscaling.replica import Engine, MakeReplica
from benchmarks.autoscaling.results import Figures, figures
from benchmarks.autoscaling.simulation import FleetSample, Scenario, simulate
from benchmarks.autoscaling.traces import Trace

MOST_REPLICAS = 16
OURS = "FastGen"


@dataclass(frozen=True, slots=True)
class Row:
    """One run: a row of the results table."""

    trace: Trace
    configuration: PolicyConfiguration
    figures: Figures
    samples: tuple[FleetSample, ...]


def compare(
    engine: Engine,
    traces: Sequence[Trace],
    *,
    begin: int = 2,
    seed: int = 1,
    most: int = MOST_REPLICAS,
    balancer: Balancer = random_pod,
    make: MakeReplica = ApproximateReplica,
    only: Sequence[str] = (),
) -> Iterator[Row]:
    """Run every policy, or those whose names start with one of `only`, on every trace with identical requests."""
    for trace in traces:
        scenario = Scenario(
            trace=trace, engine=engine, cluster=Cluster(), begin=begin, most=most, seed=seed, balancer=balancer
        )
        for configuration in policy_configurations(engine, trace.mix, most):
            if not only or configuration.name.startswith(tuple(only)):
                run = simulate(scenario, configuration.make(), make)
                yield Row(trace, configuration, figures(run), run.samples)


def is_dominated(ours: Sequence[Row], other: Row) -> bool:
    """Return whether one of our rows has at least its attainment at no more GPU-hours."""
    return any(
        row.figures.attainment >= other.figures.attainment and row.figures.gpu_hours <= other.figures.gpu_hours
        for row in ours
    )


def is_interpolated(ours: Sequence[Row], other: Row) -> bool:
    """Return whether interpolating between two of our utilization settings is at least as good."""
    points = sorted((row.figures.gpu_hours, row.figures.attainment) for row in ours)
    hours, attained = other.figures.gpu_hours, other.figures.attainment
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= hours <= right and right > left:
            return attained <= low + (high - low) * (hours - left) / (right - left)
    return False


def better_rows(rows: Sequence[Row]) -> Iterator[tuple[Trace, list[Row]]]:
    """Yield each trace with the rows of other policies that have a higher attainment than ours at the same GPU-hours.

    Rows that are cheaper than our cheapest are omitted unless they have at least its attainment.
    """
    for trace in dict.fromkeys(row.trace for row in rows):
        here = [row for row in rows if row.trace is trace]
        ours = [row for row in here if row.configuration.family == OURS]
        if not ours:
            yield trace, []
            continue
        cheapest = min(ours, key=lambda row: row.figures.gpu_hours)
        ahead = []
        for row in here:
            if row.configuration.family == OURS or is_dominated(ours, row) or is_interpolated(ours, row):
                continue
            cheaper = row.figures.gpu_hours < cheapest.figures.gpu_hours
            if not cheaper or row.figures.attainment >= cheapest.figures.attainment:
                ahead.append(row)
        yield trace, ahead
