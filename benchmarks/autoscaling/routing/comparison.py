"""Run all routings on all fleets and traces with several seeds, and render the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from benchmarks.autoscaling.conversations import conversation_traces
from benchmarks.autoscaling.device import A100_8B
from benchmarks.autoscaling.fleet import Cluster, MakeRouting, balanced, least_loaded_of_all, random_pod
from benchmarks.autoscaling.policies.fastgen import Operator
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.pool import Key, Store, run_all
from benchmarks.autoscaling.replica import Engine, Targets
from benchmarks.autoscaling.results import Figures, figures, interval
from benchmarks.autoscaling.routing.gateway import Gateway
from benchmarks.autoscaling.routing.prefix_hash import PrefixHash
from benchmarks.autoscaling.routing.round_robin import RoundRobin
from benchmarks.autoscaling.routing.tokens_in_flight import tokens_in_flight
from benchmarks.autoscaling.simulation import Policy, Scenario, simulate
from benchmarks.autoscaling.traces import Trace

ENGINE: Final = Engine(A100_8B, Targets(1.0, 0.050), prefix_cache=True)
OURS: Final = "FastGen's gateway"
ROUTINGS: Final[Mapping[str, MakeRouting]] = {
    "random, a Service": balanced(random_pod),
    "round robin": RoundRobin,
    "least requests": balanced(least_loaded_of_all),
    "prefix hash, KubeAI": PrefixHash,
    "tokens in flight, llm-d, 18 s": tokens_in_flight(A100_8B, 18.0),
    "tokens in flight, llm-d, 1 s": tokens_in_flight(A100_8B, 1.0),
    OURS: Gateway,
}
_MOST_REPLICAS: Final = 8


def _autoscaler() -> Policy:
    spec = {"device": "cuda", "maxSequences": A100_8B.max_sequences}
    return Operator({"maxReplicas": _MOST_REPLICAS}, spec)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a run, and what decides their number."""

    what: str
    begin: int
    cluster: Cluster
    policy: Callable[[], Policy]


FLEETS: Final[Mapping[str, Replicas]] = {
    "three": Replicas("Three replicas", 3, Cluster(), lambda: Fixed(3)),
    "one-slow": Replicas(
        "Three replicas, of which one takes three times as long for each step",
        3, Cluster(slow={2: 3.0}), lambda: Fixed(3),
    ),
    "autoscaled": Replicas("FastGen's autoscaler, from two replicas up to eight", 2, Cluster(), _autoscaler),
}  # fmt: skip


# Without shared prefixes, `docs/benchmarks/autoscaling.md` has the autoscaler's figures.
SKIPPED: Final = frozenset({("autoscaled", "no-prefixes")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to run: prefixes of names, or all if empty; `seconds` is the length of a trace after its warm-up."""

    seconds: float
    seeds: int
    fleets: Sequence[str] = ()
    traces: Sequence[str] = ()
    routings: Sequence[str] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """What runs of one file have in common."""
        return {"device": A100_8B.name, "seconds": self.seconds}

    def run(self, store: Store, jobs: int) -> None:
        """Run what the store lacks in `jobs` processes."""
        run_all(list(self._tasks()), store, jobs)

    def _tasks(self) -> Iterator[tuple[Key, Callable[[], Figures]]]:
        for seed in range(1, self.seeds + 1):
            for trace in _chosen({each.name: each for each in conversation_traces(self.seconds)}, self.traces).values():
                for fleet, replicas in _chosen(FLEETS, self.fleets).items():
                    if (fleet, trace.name) in SKIPPED:
                        continue
                    for name, routing in _chosen(ROUTINGS, self.routings).items():
                        yield (f"{fleet}/{trace.name}", name, seed), _task(trace, replicas, routing, seed)


def _chosen(named: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    return {name: each for name, each in named.items() if not prefixes or name.startswith(tuple(prefixes))}


def _task(trace: Trace, replicas: Replicas, routing: MakeRouting, seed: int) -> Callable[[], Figures]:
    return lambda: figures(simulate(scenario(trace, replicas, routing, seed), replicas.policy()))


def scenario(trace: Trace, replicas: Replicas, routing: MakeRouting, seed: int) -> Scenario:
    """Return the input of one run. All routings get the same requests for a seed."""
    return Scenario(
        trace=trace, engine=ENGINE, cluster=replicas.cluster, begin=replicas.begin, most=_MOST_REPLICAS,
        routing=routing, seed=seed,
    )  # fmt: skip


_HEAD: Final = (
    "| routing | first token p50 / p95 / p99, s | in time, % | from the prefix cache, % | GPU-hours |\n"
    "|---|---|---|---|---|"
)


def tables(store: Store) -> Iterator[str]:
    """Yield the lines of a table for each fleet and trace, of the runs in the store."""
    for fleet, replicas in FLEETS.items():
        yield f"### {replicas.what}\n"
        for trace in conversation_traces(60.0):
            rows = {name: _runs(store, f"{fleet}/{trace.name}", name) for name in ROUTINGS}
            if not any(rows.values()):
                continue
            yield f"`{trace.name}`: {trace.what}.\n\n{_HEAD}"
            yield from (_line(name, runs) for name, runs in rows.items() if runs)
            yield ""


def _runs(store: Store, where: str, name: str) -> list[Figures]:
    found = ((seed, run) for (place, routing, seed), run in store.runs.items() if (place, routing) == (where, name))
    return [run for _, run in sorted(found, key=lambda pair: pair[0])]


def _line(name: str, runs: Sequence[Figures]) -> str:
    firsts = " / ".join(f"{fmean(getattr(run, f'first_{part}') for run in runs):.2f}" for part in ("p50", "p95", "p99"))
    in_time, hits, hours = (
        interval([getattr(run, field) for run in runs]).show(factor, digits)
        for field, factor, digits in (("attainment", 100, 1), ("hit_ratio", 100, 1), ("gpu_hours", 1, 2))
    )
    return f"| {name} | {firsts} | {in_time} | {hits} | {hours} |"
