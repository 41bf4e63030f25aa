"""Measure what earlier days teach: `python -m benchmarks.autoscaling.days`.

The trace `day` is repeated, with new requests each time, and only the requests of its last day count. Days are as short
as in the comparison, so the operator divides them into bins of a minute. Several of them are in the hours that it
rehearses, which is not so with real days: "days" is without the bound that those require.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from benchmarks.autoscaling.comparison import MOST_REPLICAS
from benchmarks.autoscaling.device import A100_8B
from benchmarks.autoscaling.policies.fastgen import Operator
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.replica import Engine, Targets
from benchmarks.autoscaling.scenarios import SITUATIONS, cluster_of
from benchmarks.autoscaling.simulation import Policy, Run, Scenario, simulate
from benchmarks.autoscaling.traces import AZURE_CONVERSATION, WARM_UP, Rate, Trace, day, step, varying
from fastgen_operator.autoscale.rehearsal.days import Calendar

_BIN_SECONDS = 60
_LOW, _HIGH = 4.0, 24.0
_POLICIES: Mapping[str, Collection[Literal["hours", "days"]]] = {
    "default": (),
    "hours": ("hours",),
    "days": ("days",),
    "hours and days": ("hours", "days"),
}


def repeated(rate: Rate, days: int, length: float) -> Trace:
    """Return a trace of equal days after the warm-up, with other requests each day."""
    seconds = WARM_UP + days * length
    requests = varying(AZURE_CONVERSATION, seconds, lambda at: rate(at % length), _HIGH)
    return Trace("days", f"{days} equal days", seconds, AZURE_CONVERSATION, requests)


def last_day(run: Run, length: float) -> tuple[float, float]:
    """Return the share of the requests of the last day in time, and its GPU-hours."""
    end, limit = run.scenario.trace.seconds, run.scenario.engine.targets.first_token
    begin = end - length
    served = [row for row in run.log.served if row[0] >= begin]
    lost = sum(arrival >= begin for arrival in run.log.lost)
    in_time = sum(met and first - arrival <= limit for arrival, first, _, met in served)
    hours = sum(max(0.0, min(end, until) - max(begin, since)) for since, until in run.gpu_intervals) / 3600
    return in_time / max(1, len(served) + lost), hours


def main() -> None:
    """Print the requests in time and the GPU-hours of the last day, with and without what the days before teach."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling.days", description=__doc__)
    parser.add_argument("--days", type=int, default=6)
    parser.add_argument("--length", type=int, default=1800, help="seconds of a day, a multiple of 60")
    parser.add_argument("--start", type=float, default=300.0, help="mean seconds from a GPU to a ready pod")
    parser.add_argument("--seed", type=int, action="append", default=[], help="can be repeated; default: 1")
    parser.add_argument("--rate", choices=("cosine", "step"), default="cosine", help="the course of a day")
    parser.add_argument("--fixed", type=int, action="append", default=[], help="also run this constant fleet")
    parser.add_argument("--only", action="append", choices=_POLICIES, help="run only this policy; can be repeated")
    given = parser.parse_args()
    length = given.length
    rate = day(_LOW, _HIGH, length) if given.rate == "cosine" else step(_LOW, _HIGH, length / 3, 2 * length / 3)
    trace = repeated(rate, given.days, length)
    engine = Engine(A100_8B, Targets(1.0, 0.050))
    calendar = Calendar(_BIN_SECONDS, length // _BIN_SECONDS)

    def operator(learns_from: Collection[Literal["hours", "days"]]) -> Callable[[], Policy]:
        targets = {"timeToFirstTokenMilliseconds": 1000, "interTokenLatencyMilliseconds": 50}
        learning = "Apply" if learns_from else "Advise"
        autoscaling = {"maxReplicas": MOST_REPLICAS, "targets": targets, "learning": learning}
        spec = {"device": "cuda", "maxSequences": engine.device.max_sequences}
        return lambda: Operator(autoscaling, spec, calendar=calendar, learns_from=learns_from)

    def fixed(replicas: int) -> Callable[[], Policy]:
        return lambda: Fixed(replicas)

    policies = {name: operator(_POLICIES[name]) for name in given.only or _POLICIES}
    policies |= {f"{replicas} replicas": fixed(replicas) for replicas in given.fixed}
    for seed in given.seed or [1]:
        for name, make in policies.items():
            began = time.process_time()
            scenario = Scenario(
                trace=trace, engine=engine, cluster=cluster_of(SITUATIONS[0], given.start), begin=2, most=MOST_REPLICAS,
                seed=seed,
            )  # fmt: skip
            policy = make()
            attained, hours = last_day(simulate(scenario, policy), length)
            spent = time.process_time() - began
            print(f"seed {seed}, {name}: {100 * attained:.1f} % in time, {hours:.2f} GPU-hours ({spent:.0f} s)")
            if isinstance(policy, Operator):
                print(f"  {policy.record.learning.message}", flush=True)


if __name__ == "__main__":
    main()
