"""All contestants on all traces, and who leads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.autoscaling.coarse import CoarseReplica
from benchmarks.autoscaling.contestants import Contestant, contestants
from benchmarks.autoscaling.fleet import Balancer, Cluster, random_pod
from benchmarks.autoscaling.replica import Engine, MakeReplica
from benchmarks.autoscaling.results import Figures, figures
from benchmarks.autoscaling.simulation import Look, Scenario, simulate
from benchmarks.autoscaling.traces import Trace

MOST_REPLICAS = 16
OURS = "FastGen"


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the table."""

    trace: Trace
    contestant: Contestant
    figures: Figures
    looks: tuple[Look, ...]


def compare(
    engine: Engine,
    traces: Sequence[Trace],
    *,
    begin: int = 2,
    seed: int = 1,
    most: int = MOST_REPLICAS,
    balancer: Balancer = random_pod,
    make: MakeReplica = CoarseReplica,
    only: Sequence[str] = (),
) -> Iterator[Row]:
    """Every contestant, or those whose name begins with one of `only`, on every trace: the same requests for all."""
    for trace in traces:
        scenario = Scenario(
            trace=trace, engine=engine, cluster=Cluster(), begin=begin, most=most, seed=seed, balancer=balancer
        )
        for contestant in contestants(engine, trace.mix, most):
            if not only or contestant.name.startswith(tuple(only)):
                run = simulate(scenario, contestant.make(), make)
                yield Row(trace, contestant, figures(run), run.looks)


def better_than(ours: Sequence[Row], other: Row) -> bool:
    """Does one of our settings attain as much or more at as many GPU-hours or fewer?"""
    return any(
        row.figures.attainment >= other.figures.attainment and row.figures.gpu_hours <= other.figures.gpu_hours
        for row in ours
    )


def level_with(ours: Sequence[Row], other: Row) -> bool:
    """Is it not better than what lies between two of our settings? Utilization is a number: between two lie others."""
    points = sorted((row.figures.gpu_hours, row.figures.attainment) for row in ours)
    hours, attained = other.figures.gpu_hours, other.figures.attainment
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= hours <= right and right > left:
            return attained <= low + (high - low) * (hours - left) / (right - left)
    return False


def verdicts(rows: Sequence[Row]) -> Iterator[tuple[Trace, list[Row]]]:
    """Of each trace, the runs of others that attain more than ours do for as many GPU-hours.

    Those that cost less than the cheapest of ours are left out unless they attain as much as it does.
    """
    for trace in dict.fromkeys(row.trace for row in rows):
        here = [row for row in rows if row.trace is trace]
        ours = [row for row in here if row.contestant.family == OURS]
        if not ours:
            yield trace, []
            continue
        cheapest = min(ours, key=lambda row: row.figures.gpu_hours)
        ahead = []
        for row in here:
            if row.contestant.family == OURS or better_than(ours, row) or level_with(ours, row):
                continue
            cheaper = row.figures.gpu_hours < cheapest.figures.gpu_hours
            if not cheaper or row.figures.attainment >= cheapest.figures.attainment:
                ahead.append(row)
        yield trace, ahead
