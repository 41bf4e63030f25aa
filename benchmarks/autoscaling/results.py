"""Service quality and cost of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.autoscaling.simulation import Run
from benchmarks.autoscaling.traces import WARM_UP


@dataclass(frozen=True, slots=True)
class Figures:
    """Results for the requests that arrived after the warm-up.

    Attributes:
        attainment: share of the requests that completed with the first token and all gaps within their targets.
        gaps_met: share of the gaps between tokens within their target, warm-up included.
        first_p50, first_p99: time to first token of served requests, in seconds.
        lost: share of rejected or aborted requests.
        gpu_hours: GPU-hours from the scheduling to the end of each pod.
        changes_per_hour: changes of the desired replicas per hour.
        worst_backlog: maximum of the prompt tokens queued in the fleet.
        first_p95: as `first_p50`; 0 in files of runs before it was recorded.
        hit_ratio: share of the prompt tokens of served requests that was in the prefix cache.
    """

    attainment: float
    gaps_met: float
    first_p50: float
    first_p99: float
    lost: float
    gpu_hours: float
    changes_per_hour: float
    worst_backlog: int
    first_p95: float = 0.0
    hit_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval; infinite for a single value."""

    mean: float
    half: float

    def show(self, factor: float, digits: int) -> str:
        """Return the interval for a table, in units of 1 / factor."""
        tail = "" if math.isinf(self.half) else f" ± {factor * self.half:.{digits}f}"
        return f"{factor * self.mean:.{digits}f}{tail}"


# Quantile 0.975 of Student's t by degrees of freedom; 1.96 beyond.
_STUDENT = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent runs with its 95 % confidence interval."""
    if len(values) < 2:
        return Interval(mean(values), math.inf)
    degrees = len(values) - 1
    quantile = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 1.96
    return Interval(mean(values), quantile * stdev(values) / math.sqrt(len(values)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value at quantile `share` of sorted values; infinite if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def figures(run: Run) -> Figures:
    """Summarize a run."""
    log, end = run.log, run.scenario.trace.seconds
    limit = run.scenario.engine.targets.first_token
    served = [row for row in log.served if row[0] >= WARM_UP]
    lost = sum(arrival >= WARM_UP for arrival in log.lost)
    total = max(1, len(served) + lost)
    firsts = sorted(first - arrival for arrival, first, _, _ in served)
    hours = (end - WARM_UP) / 3600
    prompts = [(prompt, hit) for arrival, prompt, hit in log.prompts if arrival >= WARM_UP]
    return Figures(
        attainment=sum(met and first - arrival <= limit for arrival, first, _, met in served) / total,
        gaps_met=1 - log.late_gaps / max(1, log.gaps),
        first_p50=percentile(firsts, 0.5),
        first_p99=percentile(firsts, 0.99),
        lost=lost / total,
        gpu_hours=sum(max(0.0, min(end, b) - max(WARM_UP, a)) for a, b in run.gpu_intervals) / 3600,
        changes_per_hour=sum(time >= WARM_UP for time, _ in run.changes) / hours,
        worst_backlog=max((sample.backlog for sample in run.samples if sample.time >= WARM_UP), default=0),
        first_p95=percentile(firsts, 0.95),
        hit_ratio=sum(hit for _, hit in prompts) / max(1, sum(prompt for prompt, _ in prompts)),
    )
