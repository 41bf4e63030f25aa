"""Replicas and their volume on two nodes, with the real scheduler and the real attach/detach controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import POD
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.metrics import Metrics
from harness.block_storage import TOLERATION, Nodes, gpu_nodes, local_volumes, scheduler, volume
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]


@pytest.fixture
def nodes(space: Space, plane: ControlPlane) -> Iterator[Nodes]:
    """Two nodes with two GPUs each, and a scheduler that spreads pods over them."""
    # Names of their own: pods of an earlier test, whose namespace is being deleted, still occupy its nodes.
    names = [f"{side}-{uuid4().hex[:5]}" for side in ("west", "east")]
    with scheduler(plane), gpu_nodes(space, *names, gpus=2) as found:
        yield found


def served(storage_class: str, access_mode: str, **spec: Any) -> Object:
    """Return a resource with one GPU for each replica, and a cached model."""
    return resource(
        model={"source": "hf://tests/tiny"},
        cache={"size": "1Gi", "storageClassName": storage_class, "accessMode": access_mode},
        engine={"device": "cuda"},
        resources={"gpu": {"count": 1}},
        scheduling={"tolerations": [TOLERATION]},
        **spec,
    )


def ready(space: Space, count: int) -> bool:
    status = space.get("fgd", "chat").get("status", {})
    return status.get("readyReplicas") == status.get("replicas") == count


def test_replicas_share_the_node_of_a_read_write_once_volume_and_move_together(space: Space, nodes: Nodes) -> None:
    with volume(space, "ReadWriteOnce") as name:
        space.apply(served(name, "ReadWriteOnce", replicas=2))
        nodes.until(lambda: ready(space, 2), what="two ready replicas")
        (home,) = set(nodes.bound().values())
        assert nodes.attached(name) == {home}
        condition = space.wait_condition("PodsScheduled", "True", "AllScheduled")
        assert f"all on node {home}, because the volume chat is ReadWriteOnce" in condition["message"]

        # The third replica finds no GPU there. The other node has two, but not the volume.
        space.patch("fgd/chat", {"spec": {"replicas": 3}})
        condition = space.wait_condition("Ready", "False", "VolumeOnOneNode")
        assert f"all replicas must run on node {home}" in condition["message"]
        assert "ReadWriteMany" in condition["message"]
        assert set(nodes.bound().values()) == {home}
        space.patch("fgd/chat", {"spec": {"replicas": 2, "drainSeconds": 5}})

        def rolled_out() -> bool:
            pods = space.pods()
            new = [pod for pod in pods if pod["spec"]["terminationGracePeriodSeconds"] == 35]
            return len(new) == len(pods) == 2 and ready(space, 2)

        nodes.until(rolled_out, what="the end of the rollout")
        assert set(nodes.bound().values()) == {home}

        # A drained node evicts both, before the first of them has a successor.
        nodes.cordon(home)
        for pod in nodes.bound():
            eventually(lambda pod=pod: nodes.evict(pod) or True, within=20, what=f"the eviction of {pod}")
        (other,) = set(nodes.names) - {home}

        def moved() -> bool:
            return ready(space, 2) and list(nodes.bound().values()) == [other, other]

        # In seconds, not in the five minutes after which the scheduler tries waiting pods again.
        nodes.until(moved, what="both replicas on the other node")
        assert nodes.attached(name) == {other}
        space.wait_condition("Ready", "True", "AllReplicasReady")


def test_replicas_of_a_read_write_many_volume_use_several_nodes(space: Space, nodes: Nodes) -> None:
    with volume(space, "ReadWriteMany") as name:
        space.apply(served(name, "ReadWriteMany", replicas=3))
        nodes.until(lambda: ready(space, 3), what="three ready replicas")
        assert set(nodes.bound().values()) == nodes.attached(name) == set(nodes.names)


def downloads(space: Space) -> list[Object]:
    return space.items("pods", labels="fastgen.dev/deployment=chat_fetch")


def test_the_first_pod_of_a_volume_runs_where_the_replicas_can(space: Space, plane: ControlPlane) -> None:
    """The StorageClass creates the volume where the download is scheduled, and most nodes have no GPU."""
    tag = uuid4().hex[:5]
    plain = [f"plain-{n}-{tag}" for n in range(4)]
    with (
        scheduler(plane),
        gpu_nodes(space, *plain, gpus=0),
        gpu_nodes(space, f"gpu-{tag}", gpus=1),
    ):
        nodes = Nodes(space, (*plain, f"gpu-{tag}"))
        with local_volumes(space, nodes) as storage_class:
            space.apply(served(storage_class, "ReadWriteOnce"))
            (download,) = nodes.until(lambda: downloads(space), what="the download")
            assert "nvidia.com/gpu" not in str(download["spec"]["containers"]), "it takes no GPU"
            nodes.until(lambda: ready(space, 1), what="a ready replica")
            assert set(nodes.bound().values()) == {f"gpu-{tag}"}
            space.wait_condition("Ready", "True", "AllReplicasReady")


def test_a_download_that_no_node_suits_asks_for_such_a_node(space: Space, plane: ControlPlane) -> None:
    """An autoscaler of the cluster adds nodes for what pods request."""
    tag = uuid4().hex[:5]
    nodes = Nodes(space, (f"plain-{tag}", f"gpu-{tag}"))
    with scheduler(plane), gpu_nodes(space, f"plain-{tag}", gpus=0), local_volumes(space, nodes) as storage_class:
        space.apply(served(storage_class, "ReadWriteOnce"))

        def asks() -> bool:
            return any("nvidia.com/gpu" in str(pod["spec"]["containers"]) for pod in downloads(space))

        eventually(asks, within=20, what="a download that requests a GPU")
        space.wait_condition("ModelCached", "False", "Unschedulable")
        with gpu_nodes(space, f"gpu-{tag}", gpus=1):
            nodes.until(lambda: ready(space, 1), what="a ready replica")


def test_a_finished_job_that_is_removed_does_not_disturb_what_serves(
    space: Space, nodes: Nodes, operator: OperatorProcess
) -> None:
    with volume(space, "ReadWriteOnce") as name:
        space.apply(served(name, "ReadWriteOnce"))
        nodes.until(lambda: ready(space, 1), what="a ready replica")
        space.wait_condition("Ready", "True", "AllReplicasReady")
        (job,) = space.items("jobs")
        space.kubectl("delete", "job", job["metadata"]["name"])
        claim = space.get("pvc", "chat")
        assert claim["metadata"]["annotations"]["fastgen.dev/cached"].startswith(claim["metadata"]["uid"])
        settled = space.settled()
        operator.let_resyncs_pass(3)
        assert space.versions() == settled
        assert space.items("jobs") == []
        operator.restart()
        operator.let_resyncs_pass(3)
        assert space.versions() == settled
        condition = space.wait_condition("ModelCached", "True", "Cached")
        assert space.condition("Ready")["status"] == "True", condition


def test_a_waiting_pod_is_replaced_only_if_it_has_not_changed(space: Space) -> None:
    """It may have been scheduled meanwhile."""
    client = KubeClient(space.server, InformerCache(), Metrics(), lambda: True)
    space.apply(resource())
    (seen,) = space.wait_pods(1)
    name = seen["metadata"]["name"]
    space.patch(f"pod/{name}", {"metadata": {"annotations": {"changed": "yes"}}})
    assert not client.delete(POD, seen)
    assert not space.get("pod", name)["metadata"].get("deletionTimestamp")
    eventually(lambda: client.delete(POD, space.get("pod", name)), within=20, what="its deletion")
    eventually(lambda: name not in [pod["metadata"]["name"] for pod in space.pods()], within=20, what="its end")
