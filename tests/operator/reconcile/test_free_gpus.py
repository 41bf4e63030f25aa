"""How many GPUs the best node has free: what its pods request is subtracted from what it has."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fastgen_operator.kinds import POD, Kind, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.situation import NodeGPUs
from fastgen_operator.reconcile.free_gpus import MOST_NODES, FreeGPUs
from fastgen_operator.reconcile.nodes import TRUST
from harness.objects import NOW

GPU = "nvidia.com/gpu"
REPLICA: Object = {"containers": [{}], "nodeSelector": {"pool": "gpus"}}


def node(name: str, count: int | None, *taints: str, pool: str = "gpus") -> Object:
    return {
        "metadata": {"name": name, "labels": {"pool": pool}},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"allocatable": {} if count is None else {GPU: str(count)}},
    }


def holding(*counts: int, init: int = 0) -> Object:
    """Return a pod whose containers request so many GPUs."""
    containers = [{"resources": {"limits": {GPU: str(count)}}} for count in counts]
    return {"spec": {"containers": containers, "initContainers": [{"resources": {"limits": {GPU: str(init)}}}]}}


class Server:
    """An API server with the pods of these nodes; the nodes that have none cannot be listed."""

    def __init__(self, **pods: list[Object]) -> None:
        self.pods = pods
        self.asked: list[str] = []

    def list(self, kind: Kind, namespace: str | None, *, fields: str) -> tuple[str, Any]:
        assert (kind, namespace) == (POD, None)
        on_node, *phases = fields.split(",")
        assert phases == ["status.phase!=Succeeded", "status.phase!=Failed"], "these hold no GPU any more"
        name = on_node.removeprefix("spec.nodeName=")
        self.asked.append(name)
        if name not in self.pods:
            raise KubeError(403, "forbidden")
        return "1", iter(self.pods[name])


def best(server: Server, *nodes: Object) -> NodeGPUs | None:
    return FreeGPUs(cast(KubeClient, server)).best_node(REPLICA, GPU, nodes, NOW)


def test_the_best_node_is_the_one_with_the_most_free() -> None:
    server = Server(large=[holding(2, 4), holding(1, init=1)], small=[holding(1)], other=[], tainted=[])
    nodes = [node("large", 8), node("small", 4), node("none", None), node("other", 8, pool="cpus")]
    assert best(server, *nodes, node("tainted", 8, "only-others")) == NodeGPUs(3, 4)
    assert server.asked == ["large", "small"], "the others cannot run the replica"


def test_a_taint_with_the_name_of_the_gpus_excludes_no_node() -> None:
    assert best(Server(a=[holding(1)]), node("a", 2, GPU)) == NodeGPUs(1, 2)


def test_an_init_container_may_hold_more_than_the_containers() -> None:
    assert best(Server(a=[holding(1, init=3)]), node("a", 4)) == NodeGPUs(1, 4)


def test_nodes_without_room_have_none_free_and_never_fewer() -> None:
    assert best(Server(a=[holding(8), holding(2)]), node("a", 8)) == NodeGPUs(0, 8)


@pytest.mark.parametrize("nodes", [[], [node("a", None)], [node("a", 1), node("forbidden", 1)]])
def test_it_is_unknown_without_nodes_that_have_gpus_or_without_the_right_to_list_pods(nodes: list[Object]) -> None:
    assert best(Server(a=[]), *nodes) is None


def test_of_many_nodes_none_is_looked_at() -> None:
    names = [f"n{number}" for number in range(MOST_NODES + 1)]
    server = Server(**{name: [] for name in names})
    assert best(server, *(node(name, 8) for name in names)) is None
    assert not server.asked


def test_what_was_counted_is_used_for_a_second() -> None:
    server = Server(a=[holding(1)])
    free = FreeGPUs(cast(KubeClient, server))
    for _ in range(3):
        assert free.best_node(REPLICA, GPU, [node("a", 4)], NOW) == NodeGPUs(3, 4)
    assert server.asked == ["a"]
    server.pods["a"].append(holding(2))
    assert free.best_node(REPLICA, GPU, [node("a", 4)], NOW + TRUST) == NodeGPUs(1, 4)
