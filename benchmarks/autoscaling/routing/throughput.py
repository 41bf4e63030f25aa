"""Print how throughput scales from 1 to 16 simulated replicas behind the gateway.

Each fleet gets half more than its share of the requests that three replicas serve in time, which saturates it on these
traces; how many turns `agent-sessions` has depends more on chance. Results are identical on every machine.

    python -m benchmarks.autoscaling.routing.throughput
"""

from __future__ import annotations

from typing import Final

from benchmarks.autoscaling.conversations import conversation_traces
from benchmarks.autoscaling.fleet import Cluster
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.routing.comparison import ENGINE
from benchmarks.autoscaling.routing.gateway import Gateway
from benchmarks.autoscaling.simulation import Scenario, simulate
from benchmarks.autoscaling.traces import WARM_UP, Trace

TRACES: Final = ("shared-prompts", "no-prefixes")
REPLICAS: Final = (1, 2, 4, 8, 16)
_SECONDS, _OVERLOAD = 240.0, 1.5


def throughput(trace: Trace, replicas: int, seed: int) -> float:
    """Return the requests that a fleet finishes in a second, after the warm-up."""
    scenario = Scenario(
        trace=trace, engine=ENGINE, cluster=Cluster(), begin=replicas, most=replicas, routing=Gateway, seed=seed
    )
    ends = [end for _, _, end, _ in simulate(scenario, Fixed(replicas)).log.served]
    return sum(WARM_UP <= end < trace.seconds for end in ends) / (trace.seconds - WARM_UP)


def main() -> None:
    """Print a line for each trace."""
    print(f"| trace | {' | '.join(map(str, REPLICAS))} |\n|---{'|---' * len(REPLICAS)}|")
    for name in TRACES:
        rates = {}
        for replicas in REPLICAS:
            traces = conversation_traces(_SECONDS, _OVERLOAD * replicas / 3)
            (trace,) = (each for each in traces if each.name == name)
            rates[replicas] = throughput(trace, replicas, seed=1)
        shares = (f"{rate / (replicas * rates[1]):.2f}" for replicas, rate in rates.items())
        print(f"| `{name}` | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
