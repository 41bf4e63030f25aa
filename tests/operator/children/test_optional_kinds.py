"""Children in the cluster: PodMonitors (with their real CRD), NetworkPolicies, budgets."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.controlplane import ControlPlane
from harness.chart import Helm
from harness.definitions import POD_MONITOR_CRD
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

OPTIONAL = "podmonitors.monitoring.coreos.com"


def install(plane: ControlPlane) -> None:
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(POD_MONITOR_CRD.fetch()))
    plane.wait_for_crds(OPTIONAL)


def uninstall(plane: ControlPlane) -> None:
    plane.kubectl("delete", "crd", OPTIONAL, "--ignore-not-found")


@pytest.fixture
def bare(plane: ControlPlane) -> Iterator[ControlPlane]:
    """Yield the control plane; the optional kind is uninstalled afterwards."""
    yield plane
    uninstall(plane)


def made(space: Space, kind: str, name: str = "chat") -> Object:
    """Wait for the child and return it."""
    found = eventually(lambda: space.get(kind, name), within=20, what=f"{kind}/{name}")
    assert found is not None
    return found


def versions(space: Space) -> dict[str, str]:
    return space.versions() | {OPTIONAL: space.get(OPTIONAL, "chat")["metadata"]["resourceVersion"]}


def failures(operator: OperatorProcess) -> float:
    return operator.metrics()["fastgen_operator_reconcile_errors_total", ""]


def test_children_of_an_optional_kind_follow_the_installation_of_its_crd(
    bare: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    operator.restart()
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    install(bare)
    enabled = ("--set", "operator.podMonitor.enabled=true", "--set", "operator.networkPolicy.enabled=true")
    for kind in ("PodMonitor", "NetworkPolicy"):
        obj = Helm(bare.programs / "helm").one(kind, *enabled)
        bare.kubectl("apply", "--dry-run=server", "--filename", "-", stdin=json.dumps(obj))
    assert made(space, OPTIONAL)["spec"]["podTargetLabels"] == ["fastgen.dev/deployment"]
    space.settled()
    before, writes = versions(space), operator.writes()
    operator.let_resyncs_pass(4)
    assert (versions(space), operator.writes()) == (before, writes)
    operator.restart()
    operator.let_resyncs_pass(3)
    assert (versions(space), operator.writes()) == (before, {})
    uninstall(bare)
    eventually(
        lambda: operator.log.read_text().rstrip().count("cluster serves: none") >= 1,
        within=20,
        what="the kinds to be uninstalled",
    )
    operator.let_resyncs_pass(3)
    assert failures(operator) == 0
    assert space.condition("Ready")["status"] == "True"
    install(bare)
    made(space, OPTIONAL)


def test_manual_changes_of_the_network_policy_are_reverted(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource())
    spec = made(space, "networkpolicy")["spec"]
    space.patch("networkpolicy/chat", {"spec": {"ingress": [*spec["ingress"], {}]}})
    eventually(lambda: space.get("networkpolicy", "chat")["spec"] == spec, within=20, what="the rule to be removed")
    space.patch("networkpolicy/chat", {"spec": {"podSelector": {"matchLabels": {"nobody": "at-all"}}}})
    eventually(
        lambda: space.get("networkpolicy", "chat")["spec"] == spec, within=20, what="the selector to be restored"
    )


def test_the_disruption_budget_follows_min_available_and_the_replicas(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource(replicas=2, disruption={"minAvailable": 1}))
    space.make_ready(count=2)
    eventually(
        lambda: space.get("pdb", "chat")["status"].get("disruptionsAllowed") == 1,
        within=30,
        what="one allowed disruption",
    )
    budget = space.get("pdb", "chat")
    assert budget["spec"]["minAvailable"] == 1
    assert budget["status"]["expectedPods"] == 2
    space.patch("fgd/chat", {"spec": {"replicas": 1}})
    eventually(
        lambda: space.get("pdb", "chat")["spec"].get("maxUnavailable") == 1,
        within=20,
        what="one pod at a time to be evictable",
    )
    assert "minAvailable" not in space.get("pdb", "chat")["spec"]
