"""What users had of a run, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.autoscaling.simulation import Run
from benchmarks.autoscaling.traces import WARM_UP


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that came after the warm-up.

    Attributes:
        attainment: share of all requests that were answered whole, the first token within its target and each gap
            within its own.
        gaps_met: share of the gaps between tokens that were within their target, warm-up included.
        first_p50, first_p99: seconds to the first token of those served.
        lost: share refused or cut off.
        gpu_hours: from a pod's GPU to its end.
        changes_per_hour: how often the number wanted changed.
        worst_backlog: prompt tokens that were waiting in the whole fleet.
    """

    attainment: float
    gaps_met: float
    first_p50: float
    first_p99: float
    lost: float
    gpu_hours: float
    changes_per_hour: float
    worst_backlog: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the sorted values are below; infinite where there is none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def figures(run: Run) -> Figures:
    """Sums a run up."""
    ledger, end = run.ledger, run.scenario.trace.seconds
    limit = run.scenario.engine.targets.first_token
    served = [row for row in ledger.served if row[0] >= WARM_UP]
    lost = sum(arrival >= WARM_UP for arrival in ledger.lost)
    total = max(1, len(served) + lost)
    firsts = sorted(first - arrival for arrival, first, _, _ in served)
    hours = (end - WARM_UP) / 3600
    return Figures(
        attainment=sum(met and first - arrival <= limit for arrival, first, _, met in served) / total,
        gaps_met=1 - ledger.late_gaps / max(1, ledger.gaps),
        first_p50=percentile(firsts, 0.5),
        first_p99=percentile(firsts, 0.99),
        lost=lost / total,
        gpu_hours=sum(max(0.0, min(end, b) - max(WARM_UP, a)) for a, b in run.gpu_intervals) / 3600,
        changes_per_hour=sum(time >= WARM_UP for time, _ in run.changes) / hours,
        worst_backlog=max((look.backlog for look in run.looks if look.time >= WARM_UP), default=0),
    )
