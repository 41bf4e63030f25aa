"""Measure what rehearsals of many fleets cost: `python -m benchmarks.autoscaling.rehearsals`.

Each fleet has six hours of recorded arrivals of one of the traces. The times are processor times, not elapsed times.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from benchmarks.autoscaling.traces import Trace, traces
from fastgen_operator.autoscale.loop import REHEARSAL_SECONDS
from fastgen_operator.autoscale.measure.rates import RequestSums
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, SLOTS, Arrivals
from fastgen_operator.autoscale.rehearsal.learning import Learning, Rehearsal, learn
from fastgen_operator.autoscale.rehearsal.replay import FleetModel

_TRACES = ("poisson", "day", "bursts", "azure-code")
# Forward tokens per second of a replica: about those of the modelled GPU.
_CAPACITY = 8000.0


def rehearsal_of(trace: Trace, seed: int, start: float) -> Rehearsal:
    """Return the rehearsal of a fleet that has recorded a trace."""
    arrivals = trace.arrivals(seed)
    tokens = [0.0] * (SLOTS + 1)
    for arrival in arrivals:
        if (slot := int(arrival.time // SLOT_SECONDS)) <= SLOTS:
            tokens[slot] += arrival.prompt + arrival.generate
    record = Arrivals()
    for slot, count in enumerate(tokens, 1):
        record = record.add(slot * SLOT_SECONDS, count / SLOT_SECONDS)
    prompt, generated = sum(each.prompt for each in arrivals), sum(each.generate for each in arrivals)
    model = FleetModel(
        policy=Policy(min_replicas=1, max_replicas=16, derives_utilization=True),
        tokens_per_second=_CAPACITY,
        start_seconds=start,
        requests=RequestSums(len(arrivals), prompt, generated, prompt),
    )
    return Rehearsal(model=model, arrivals=record.encode())


def main() -> None:
    """Print the processor time of a rehearsal of each trace, and the share of a core that all fleets take."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling.rehearsals", description=__doc__)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--start", type=float, default=60.0, help="seconds that a replica takes to start")
    given = parser.parse_args()
    chosen = [trace for trace in traces(1.0, SLOTS * SLOT_SECONDS) if trace.name in _TRACES]
    rehearsals = {trace.name: rehearsal_of(trace, 1, given.start) for trace in chosen}
    spent: dict[str, list[float]] = defaultdict(list)
    learned: dict[str, Learning] = {}
    for fleet in range(given.fleets):
        name = chosen[fleet % len(chosen)].name
        began = time.process_time()
        learned[name] = learn(rehearsals[name])
        spent[name].append(time.process_time() - began)
    for name, seconds in spent.items():
        found = learned[name]
        print(f"{name}: {1000 * sum(seconds) / len(seconds):.0f} ms; {found.verdict}: {found.message}")
    total = sum(map(sum, spent.values()))
    share = total / REHEARSAL_SECONDS
    print(f"{given.fleets} fleets: {total:.1f} s of a core, {share:.1%} of one every {REHEARSAL_SECONDS:g} s")


if __name__ == "__main__":
    main()
