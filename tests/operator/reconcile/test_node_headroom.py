"""Placeholder pods that make room for replicas, with the real scheduler and the real PriorityClass of the chart."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from cluster.controlplane import ControlPlane
from harness.block_storage import TOLERATION, Nodes, gpu_nodes, scheduler
from harness.chart import CLUSTER_NAME, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

PLACEHOLDERS = "chat_headroom"


@pytest.fixture
def operator(plane: ControlPlane, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> OperatorProcess:
    """An operator of the test's namespace that may create placeholders."""
    settings = ("--namespace", space.name, f"--headroom-priority-class={CLUSTER_NAME}-headroom")
    operators.append(OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", settings))
    operators[0].start()
    return operators[0]


def served(headroom: int, replicas: int = 1) -> Object:
    """Return a resource with one GPU for each replica, whose number is set by hand."""
    return resource(
        engine={"device": "cuda"},
        resources={"gpu": {"count": 1}},
        scheduling={"tolerations": [TOLERATION]},
        replicas=replicas,
        autoscaling={"mode": "DryRun", "maxReplicas": 3, "nodeHeadroom": headroom},
        rollout={"maxUnavailable": 1},
    )


def placeholders(space: Space) -> dict[str, str]:
    """Return the node of each placeholder; empty for none."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in space.pods(PLACEHOLDERS)}


def ready(space: Space, count: int) -> bool:
    status = space.get("fgd", "chat").get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    return status.get("readyReplicas") == status.get("replicas") == count and conditions["Ready"] == "True"


def headroom(space: Space) -> str:
    """Return the reason of the condition; empty without one."""
    return str((space.condition("HeadroomReserved") or {}).get("reason", ""))


def test_a_replica_takes_the_place_of_a_placeholder_which_waits_for_another_node(
    space: Space, plane: ControlPlane, operator: OperatorProcess
) -> None:
    tag = uuid4().hex[:5]
    first, second = f"first-{tag}", f"second-{tag}"
    with scheduler(plane), gpu_nodes(space, first, gpus=2) as nodes:
        space.apply(served(1))
        nodes.until(lambda: ready(space, 1) and headroom(space) == "Reserved", what="a replica and a placeholder")
        (replica,), (held,) = nodes.bound(), placeholders(space)
        assert placeholders(space)[held] == first
        assert space.get("fgd", "chat")["status"]["replicas"] == 1

        # The node is full, so the scheduler preempts the placeholder, and no other pod.
        space.patch("fgd/chat", {"spec": {"replicas": 2}})
        nodes.until(lambda: ready(space, 2), what="two ready replicas")
        assert replica in nodes.bound()
        assert set(nodes.bound().values()) == {first}
        nodes.until(lambda: headroom(space) == "WaitingForNodes", what="a placeholder that waits")
        nodes.until(lambda: list(placeholders(space).values()) == [""], what="a placeholder without a node")
        assert held not in placeholders(space)
        space.wait_condition("Ready", "True", "AllReplicasReady")
        space.wait_condition("PodsScheduled", "True", "AllScheduled")
        before, writes = space.settled(), operator.writes()
        operator.let_resyncs_pass(3)
        assert (space.settled(), operator.writes()) == (before, writes), "a placeholder that waits causes no write"

        # A node autoscaler adds a node.
        with gpu_nodes(space, second, gpus=2):
            grown = Nodes(space, (first, second))
            grown.until(lambda: list(placeholders(space).values()) == [second], what="the placeholder on it")
            grown.until(lambda: headroom(space) == "Reserved", what="room for a further replica")
            # A GPU is free for a placeholder, but the fleet has maxReplicas and needs none.
            space.patch("fgd/chat", {"spec": {"replicas": 3}})
            grown.until(lambda: ready(space, 3) and not placeholders(space), what="three replicas, no placeholder")
            assert headroom(space) == "Reserved"
            space.patch("fgd/chat", {"spec": {"replicas": 0}})
            grown.until(lambda: not nodes.bound() and len(placeholders(space)) == 1, what="a placeholder at zero")
            space.patch("fgd/chat", {"spec": {"autoscaling": {"nodeHeadroom": 0}}})

            def gone() -> bool:
                names = [each["metadata"]["name"] for each in space.items("deployments")]
                return names == ["chat"] and not placeholders(space) and not headroom(space)

            grown.until(gone, what="no placeholder")


def test_placeholders_are_deleted_with_the_resource(
    space: Space, plane: ControlPlane, operator: OperatorProcess
) -> None:
    del operator
    with scheduler(plane), gpu_nodes(space, f"node-{uuid4().hex[:5]}", gpus=2) as nodes:
        space.apply(served(1))
        nodes.until(lambda: headroom(space) == "Reserved", what="a placeholder")
        space.kubectl("delete", "fgd", "chat", "--wait=false")
        nodes.until(lambda: not space.items("deployments") and not space.items("pods"), what="nothing left")
