"""Run the comparison of docs/benchmarks/routing.md."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.autoscaling.pool import Store
from benchmarks.autoscaling.routing.comparison import Comparison, tables


def main() -> None:
    """Print a table for each fleet and trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling.routing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="length of each trace without its warm-up")
    parser.add_argument("--seeds", type=int, default=5, help="runs with different requests")
    for name in ("fleet", "trace", "routing"):
        parser.add_argument(
            f"--{name}", action="append", default=[], help=f"prefix of a {name}'s name; can be repeated; default: all"
        )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: all cores")
    parser.add_argument("--json", type=Path, help="JSON file of results; those it already has are not run again")
    given = parser.parse_args()
    comparison = Comparison(
        seconds=given.seconds, seeds=given.seeds, fleets=given.fleet, traces=given.trace, routings=given.routing
    )
    store = Store(given.json, comparison.settings)
    store.load()
    comparison.run(store, given.jobs)
    print("\n".join(tables(store)))


if __name__ == "__main__":
    main()
