"""What goes wrong in a run: variations of the cluster and of the clients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.autoscaling.fleet import Cluster
from benchmarks.autoscaling.replica import Engine


@dataclass(frozen=True, slots=True)
class Situation:
    """A named variation of the cluster and the engines' clients."""

    name: str
    what: str
    cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster
    engine: Callable[[Engine], Engine] = lambda engine: engine


SITUATIONS = (
    Situation("plain", "nothing goes wrong but 2 % of the scrapes"),
    Situation(
        "stuck", "every tenth pod never becomes ready", lambda c: replace(c, stuck=frozenset(range(3, 1000, 10)))
    ),
    Situation(
        "stragglers",
        "every tenth pod takes three times as long for each step",
        lambda c: replace(c, slow=dict.fromkeys(range(2, 1000, 10), 3.0)),
    ),
    Situation(
        "impatient", "clients give up after 10 s without a token", engine=lambda engine: replace(engine, patience=10.0)
    ),
    Situation(
        "retries",
        "clients give up after 10 s without a token, and try again twice",
        engine=lambda engine: replace(engine, patience=10.0, retries=2),
    ),
    Situation("shortage", "the cluster has only six GPUs", lambda c: replace(c, gpus=6)),
    Situation("scrape-loss", "30 % of the scrapes fail", lambda c: replace(c, scrape_loss=0.3)),
)


def cluster_of(situation: Situation, start: float) -> Cluster:
    """Return the cluster, whose pods take `start` seconds, up to a sixth more or less, to become ready."""

    def draw(rng: random.Random) -> float:
        return rng.uniform(start * 5 / 6, start * 7 / 6)

    return situation.cluster(Cluster(start=draw))
