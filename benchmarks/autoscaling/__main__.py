"""Run the comparison of docs/benchmarks/autoscaling.md."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.comparison import Grid, compare, stored
from benchmarks.autoscaling.configurations import OURS
from benchmarks.autoscaling.device import A100_8B, CPU_135M
from benchmarks.autoscaling.exact import ExactReplica
from benchmarks.autoscaling.pool import Store
from benchmarks.autoscaling.replica import Engine, Targets
from benchmarks.autoscaling.report import draw, lines, summary
from benchmarks.autoscaling.scenarios import SITUATIONS
from benchmarks.autoscaling.traces import traces

_DEVICES = {"a100": Engine(A100_8B, Targets(1.0, 0.050)), "cpu": Engine(CPU_135M, Targets(10.0, 0.4))}
# Request rate of a fleet of about four replicas, relative to the GPU's.
_SCALES = {"a100": 1.0, "cpu": 0.02}


def main() -> None:
    """Print a table per trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling", description=__doc__)
    parser.add_argument("--device", choices=sorted(_DEVICES), default="a100")
    parser.add_argument("--seconds", type=float, default=2400.0, help="length of each trace without its warm-up")
    parser.add_argument("--scale", type=float, default=1.0, help="load, relative to a fleet of about four replicas")
    parser.add_argument(
        "--trace", action="append", default=[], help="name of a trace to run; can be repeated; default: all"
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        help="prefix of the policies to run, for example FastGen; can be repeated; default: all",
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of defaults and baselines, with different requests")
    parser.add_argument("--sweep-seeds", type=int, default=3, help="runs of each setting that is chosen with hindsight")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: all cores")
    parser.add_argument("--start", type=float, default=60.0, help="mean seconds from a GPU to a ready pod")
    parser.add_argument(
        "--situation",
        choices=[situation.name for situation in SITUATIONS],
        default=SITUATIONS[0].name,
        help="; ".join(f"{situation.name}: {situation.what}" for situation in SITUATIONS).replace("%", "%%"),
    )
    parser.add_argument("--exact", action="store_true", help="simulate replicas with the real scheduler: far slower")
    parser.add_argument("--plots", type=Path, help="folder to write plots to")
    parser.add_argument("--json", type=Path, help="JSON file of results; those it already has are not run again")
    parser.add_argument("--stored", action="store_true", help="run nothing; print what --json has, and a summary")
    parser.add_argument("--quick", action="store_true", help="run one short trace with two policies")
    given = parser.parse_args()
    seconds, names, policies, seeds, sweep_seeds = (
        given.seconds, given.trace, given.policy, given.seeds, given.sweep_seeds,
    )  # fmt: skip
    if given.quick:
        seconds, names, policies, seeds, sweep_seeds = 240.0, names or ["step"], policies or [OURS, "KubeAI"], 1, 1
    grid = Grid(
        engine=_DEVICES[given.device],
        traces=[t for t in traces(given.scale * _SCALES[given.device], seconds) if not names or t.name in names],
        begin=max(1, round(2 * given.scale)),
        seeds=seeds,
        sweep_seeds=sweep_seeds,
        start=given.start,
        situation=next(each for each in SITUATIONS if each.name == given.situation),
        most=max(4, round(16 * given.scale)),
        make=ExactReplica if given.exact else ApproximateReplica,
        only=policies,
    )
    settings = {name: getattr(given, name) for name in ("device", "scale", "start", "situation", "exact")}
    store = Store(given.json, {**settings, "seconds": seconds})
    store.load()
    if given.stored:
        rows = stored(grid, store)
        print("\n".join([*summary(rows), *lines(rows)]))
        return
    begun = time.perf_counter()
    rows = compare(grid, store, given.jobs)
    print("\n".join(lines(rows)))
    print(f"\n{sum(len(row.runs) for row in rows)} runs in {time.perf_counter() - begun:.0f} s")
    if given.plots is not None:
        draw(grid, rows, given.plots)


if __name__ == "__main__":
    main()
