"""Nothing is written in the steady state, nor after a restart of the operator."""

from __future__ import annotations

import pytest

from harness.everything import EVERYTHING
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

pytestmark = pytest.mark.controlplane


@pytest.fixture
def alone(space: Space) -> Space:
    """The only namespace with resources: the operator counts its writes for all of them."""
    space.cluster.kubectl("delete", "fgd", "--all", "--all-namespaces")
    return space


def test_nothing_is_written_in_the_steady_state_nor_by_a_restart(alone: Space, operator: OperatorProcess) -> None:
    alone.apply(resource())
    alone.make_ready()
    alone.wait_condition("Ready", "True", "AllReplicasReady")
    settled, writes = alone.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert alone.versions() == settled
    operator.restart()
    operator.let_resyncs_pass(3)
    assert operator.writes() == {}
    assert alone.versions() == settled


def test_no_field_of_the_spec_causes_endless_writes(alone: Space, operator: OperatorProcess) -> None:
    alone.apply(resource(**EVERYTHING))
    eventually(lambda: alone.condition("Ready"), within=20, what="a first status")
    settled, writes = alone.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert alone.versions() == settled
    pod = alone.get("deployment", "chat")["spec"]["template"]["spec"]
    assert pod["topologySpreadConstraints"][1]["labelSelector"] == {"matchLabels": {"fastgen.dev/deployment": "chat"}}
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "2Gi", "example.com/gpu": "1"}


def test_a_field_removed_from_the_spec_is_removed_from_the_children(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource(scheduling={"nodeSelector": {"disk": "fast"}}, resources={"limits": {"memory": "2Gi"}}))
    eventually(lambda: space.condition("Ready"), within=20, what="a first status")
    space.apply(resource())

    def gone() -> bool:
        pod = space.get("deployment", "chat")["spec"]["template"]["spec"]
        return "disk" not in pod["nodeSelector"] and pod["containers"][0]["resources"] == {}

    eventually(gone, within=20, what="the fields gone from the pods")


def test_what_others_add_to_a_child_is_kept(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    space.wait_pods(1)
    space.patch("deployment/chat", {"metadata": {"annotations": {"team": "search"}}, "spec": {"minReadySeconds": 1}})
    operator.let_resyncs_pass(3)
    deployment = space.get("deployment", "chat")
    assert deployment["metadata"]["annotations"]["team"] == "search"
    assert deployment["spec"]["minReadySeconds"] == 1


def test_an_operator_killed_between_two_writes_converges_after_a_restart(
    space: Space, operator: OperatorProcess
) -> None:
    operator.stop()
    for number in range(4):
        space.apply(resource(f"chat{number}"))
    operator.start()
    eventually(lambda: space.items("services"), within=20, what="a first child", every=0.01)
    operator.kill()
    assert space.items("fgd"), "the resources outlive the operator"
    operator.start()
    for number in range(4):
        space.make_ready(f"chat{number}")
        space.wait_condition("Ready", "True", "AllReplicasReady", f"chat{number}")
    assert len(space.items("replicasets")) == 4, "a template was rolled more than once"
    assert len(space.items("pods")) == 4


def test_edits_made_while_the_operator_was_down_are_applied(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    space.wait_pods(1)
    operator.stop()
    space.patch("fgd/chat", {"spec": {"replicas": 3}})
    space.kubectl("delete", "service", "chat", "--wait=false")
    operator.start()
    space.wait_pods(3)
    assert space.get("service", "chat")["spec"]["ports"][0]["port"] == 8000
