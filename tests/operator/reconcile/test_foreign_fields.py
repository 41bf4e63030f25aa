"""Fields that others add to the Deployment: removed if they change what the pods are for, otherwise reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.space import Space, resource
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
ENGINE = "/spec/template/spec/containers/0"
TAINT = {"key": "spot", "operator": "Exists"}
ZONE = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["nowhere"]}]}
NODE_AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [ZONE]}}

CONFLICTS: list[tuple[str, str, Any]] = [
    ("spec.template.spec.tolerations", "/spec/template/spec/tolerations", [TAINT]),
    ("spec.template.spec.affinity", "/spec/template/spec/affinity", {"nodeAffinity": NODE_AFFINITY}),
    ("spec.template.spec.containers[engine].env[DEBUG]", f"{ENGINE}/env/-", {"name": "DEBUG", "value": "1"}),
    ("spec.template.spec.containers[engine].command", f"{ENGINE}/command", ["sleep"]),
    ("spec.template.spec.containers[engine].resources", f"{ENGINE}/resources", {"limits": {"cpu": "1m"}}),
]


def messages(space: Space) -> list[str]:
    return [event["message"] for event in space.items("events") if event["reason"] == "Applied"]


@pytest.mark.parametrize(("name", "path", "value"), CONFLICTS, ids=[name.split(".")[-1] for name, _, _ in CONFLICTS])
def test_an_added_field_that_conflicts_with_the_template_is_removed_and_its_manager_named(
    name: str, path: str, value: Any, space: Space
) -> None:
    before = space.serve()
    patch = [{"op": "add", "path": path, "value": value}]
    space.kubectl("patch", "deployment", "chat", "--type=json", "--patch", json.dumps(patch))
    words = f"Deployment chat restored: {name} had been added by kubectl-patch"
    eventually(lambda: words in messages(space), within=20, what=words)
    assert space.template() == before
    entries = space.get("deployment", "chat")["metadata"]["managedFields"]
    assert "kube-controller-manager" in {entry["manager"] for entry in entries}, "the others keep their fields"
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_a_node_selector_of_another_manager_is_removed_and_its_manager_named(space: Space) -> None:
    """The operator sets one of its own; the field has one owner as a whole."""
    before = space.serve()
    patch = [{"op": "add", "path": "/spec/template/spec/nodeSelector/disk", "value": "none"}]
    space.kubectl("patch", "deployment", "chat", "--type=json", "--patch", json.dumps(patch))
    words = "Deployment chat restored: spec.template.spec.nodeSelector had been changed by kubectl-patch"
    eventually(lambda: words in messages(space), within=20, what=words)
    assert space.template() == before


def test_what_rollout_undo_puts_back_is_removed_in_one_change(space: Space) -> None:
    sidecar = {"name": "old", "image": "old:1", "securityContext": SAFE}
    space.serve(scheduling={"nodeSelector": {"disk": "fast"}}, podTemplate={"spec": {"containers": [sidecar]}})
    space.apply(resource())
    eventually(lambda: "disk" not in space.template()["spec"]["nodeSelector"], within=20, what="the new template")
    after = space.template()
    space.kubectl("rollout", "undo", "deployment/chat")
    eventually(lambda: any("replaced by kubectl" in words for words in messages(space)), within=20, what="the restore")
    assert space.template() == after
    assert len(space.items("replicasets")) == 2, "no template in between"


def test_an_added_sidecar_stays_and_is_reported(space: Space) -> None:
    space.serve()
    sidecar = {"name": "proxy", "image": "proxy:1"}
    patch = [{"op": "add", "path": "/spec/template/spec/containers/-", "value": sidecar}]
    space.kubectl("patch", "deployment", "chat", "--type=json", "--patch", json.dumps(patch))
    condition = space.wait_condition("TemplateUnmodified", "False", "ForeignFields")
    assert "spec.template.spec.containers[proxy] by kubectl-patch" in condition["message"]
    assert len(space.template()["spec"]["containers"]) == 2
    asked = {"spec": {"containers": [{**sidecar, "imagePullPolicy": "Always"}]}}
    space.patch("fgd/chat", {"spec": {"podTemplate": asked}})
    eventually(lambda: not space.condition("TemplateUnmodified"), within=20, what="the end of the condition")


def test_a_field_that_the_pod_template_asks_for_stays(space: Space) -> None:
    space.serve(podTemplate={"spec": {"nodeSelector": {"disk": "fast"}}})
    before = space.template()
    body = {"spec": {"template": {"spec": {"nodeSelector": before["spec"]["nodeSelector"]}}}}
    space.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "chat"}, **body}, "--server-side")
    space.settled()
    assert space.template() == before
    assert not space.condition("TemplateUnmodified")


def test_a_restart_of_the_pods_is_not_undone(space: Space) -> None:
    space.serve()
    space.kubectl("rollout", "restart", "deployment/chat")
    eventually(lambda: len(space.items("replicasets")) == 2, within=20, what="the new pods' template")
    space.settled()
    assert "kubectl.kubernetes.io/restartedAt" in space.template()["metadata"]["annotations"]
    assert not space.condition("TemplateUnmodified")
