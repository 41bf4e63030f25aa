"""The lifecycle of a resource and its children against a real API server and its controllers."""

from __future__ import annotations

import json

import pytest

from fastgen_operator.kinds import DEPLOYMENT
from fastgen_operator.kube.transport import KubeError
from harness.adverse import quota
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]


def test_a_resource_gets_an_owned_deployment_and_service_and_pods_that_the_restricted_standard_admits(
    space: Space,
) -> None:
    space.apply(resource())
    space.wait_pods(1)
    uid = space.get("fgd", "chat")["metadata"]["uid"]
    for kind in ("deployment", "service"):
        owner = space.get(kind, "chat")["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (uid, True, True)
    container = space.get("deployment", "chat")["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:2] == ["serve", "/models/tiny.gguf"]
    assert container["image"] == "engine:test"


def test_the_resource_carries_no_finalizer_and_no_annotation_of_the_operator(space: Space) -> None:
    space.kubectl("create", "--filename", "-", stdin=json.dumps(resource()))
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    metadata = space.get("fgd", "chat")["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata


def test_an_edit_of_the_spec_changes_the_pod_template(space: Space) -> None:
    space.apply(resource())
    old = space.wait_pods(1)[0]["metadata"]["name"]
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
    eventually(lambda: [p for p in space.pods() if p["metadata"]["name"] != old], within=20, what="a new pod")
    args = space.pods()[0]["spec"]["containers"][0]["args"]
    assert args[args.index("--token-budget") + 1] == "512"


def test_kubectl_scale_changes_the_pods_and_the_selector_finds_them(space: Space) -> None:
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.kubectl("scale", "fgd/chat", "--replicas=2")
    assert space.get("fgd", "chat")["spec"]["replicas"] == 2
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    scale = space.cluster.kubectl(
        *("get", "--raw", f"/apis/fastgen.dev/v1alpha1/namespaces/{space.name}/fastgendeployments/chat/scale")
    )
    selector = json.loads(scale)["status"]["selector"]
    assert len(space.items("pods", labels=selector)) == 2


def test_a_resource_scaled_to_zero_is_ready(space: Space) -> None:
    space.apply(resource(replicas=0))
    space.wait_condition("Ready", "True", "ScaledToZero")
    assert space.pods() == []
    status = space.get("fgd", "chat")["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (0, 0, 0)


def test_deleting_the_resource_deletes_all_its_children(space: Space) -> None:
    space.apply(resource())
    space.wait_pods(1)
    space.kubectl("delete", "fgd", "chat")
    kinds = "fgd,deployments,replicasets,pods,services"
    eventually(lambda: space.items(kinds) == [], within=30, what="an empty namespace")


def test_a_changed_deployment_is_restored(space: Space) -> None:
    space.apply(resource())
    space.wait_pods(1)
    space.patch("deployment/chat", {"spec": {"replicas": 5, "progressDeadlineSeconds": 77}})

    def restored() -> bool:
        spec = space.get("deployment", "chat")["spec"]
        return (spec["replicas"], spec["progressDeadlineSeconds"]) == (1, 1800)

    eventually(restored, within=20, what="the Deployment as it was")

    def messages() -> list[str]:
        return [event["message"] for event in space.items("events") if event["reason"] == "Applied"]

    eventually(lambda: any("restored: spec." in message for message in messages()), within=20, what="the Event")


ENGINE = "/spec/template/spec/containers/0"
CPU = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "9"}}}]}}}}
EVERYONE = {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}
FOREIGN_CHANGES = [
    ("Deployment", "merge", {"spec": {"progressDeadlineSeconds": 77}}),
    ("Deployment", "strategic", CPU),
    ("Deployment", "json", [{"op": "remove", "path": f"{ENGINE}/volumeMounts/0"}]),
    ("Deployment", "json", [{"op": "add", "path": f"{ENGINE}/args/-", "value": "--verbose"}]),
    ("ServiceAccount", "merge", {"metadata": {"labels": {"app.kubernetes.io/name": "other"}}}),
    ("ServiceAccount", "merge", {"metadata": {"labels": {"app.kubernetes.io/name": None}}}),
    ("PodDisruptionBudget", "merge", {"spec": {"maxUnavailable": None}}),
    ("NetworkPolicy", "json", [{"op": "add", "path": "/spec/ingress/-", "value": EVERYONE}]),
    ("Service", "merge", {"spec": {"selector": {"app": "other"}}}),
]


def test_every_kind_of_foreign_change_to_applied_fields_is_restored(space: Space) -> None:
    """Restores a value, a quantity, an item, a list or map as a whole, a label, and a removed field."""
    space.apply(resource(resources={"requests": {"cpu": "1000m"}}))
    space.wait_pods(1)

    def state(kind: str) -> Object:
        child = space.get(kind, "chat")
        return {"spec": child.get("spec"), "labels": child["metadata"]["labels"]}

    def restores(kind: str) -> int:
        events = [event for event in space.items("events") if event["message"].startswith(f"{kind} chat restored: ")]
        return sum(event["count"] for event in events)

    for kind, way, patch in FOREIGN_CHANGES:
        before, count = state(kind), restores(kind)
        space.kubectl("patch", kind, "chat", f"--type={way}", "--patch", json.dumps(patch))
        what = f"the {kind} restored after {patch}"
        eventually(lambda kind=kind, count=count: restores(kind) == count + 1, within=20, what=what)
        assert state(kind) == before, what


def test_a_deleted_child_is_created_again(space: Space) -> None:
    space.apply(resource())
    space.wait_pods(1)
    for kind in ("service", "deployment"):
        before = space.get(kind, "chat")["metadata"]["uid"]
        space.kubectl("delete", kind, "chat", "--wait=false")

        def is_new(kind: str = kind, before: str = before) -> bool:
            return bool(space.get(kind, "chat")["metadata"]["uid"] != before)

        eventually(is_new, within=20, what=f"another {kind}")


def test_an_object_of_another_owner_is_not_changed_and_is_named(space: Space) -> None:
    space.kubectl("create", "service", "clusterip", "chat", "--tcp=80")
    before = space.get("service", "chat")["metadata"]["resourceVersion"]
    space.apply(resource())
    condition = space.wait_condition("Ready", "False", "NameTaken")
    assert "a Service named chat exists" in condition["message"]
    assert space.get("service", "chat")["metadata"]["resourceVersion"] == before
    with pytest.raises(KubeError, match="not found"):
        space.get("deployment", "chat")
    space.kubectl("delete", "service", "chat", "--wait=false")
    space.wait_pods(1)


def test_a_rejection_by_the_api_server_is_quoted_and_clears_by_itself(space: Space) -> None:
    quota(space, DEPLOYMENT, "count/deployments.apps=0")
    space.apply(resource())
    condition = space.wait_condition("Progressing", "False", "ApplyRefused")
    assert "exceeded quota: none" in condition["message"]
    assert space.condition("Ready")["reason"] == "ApplyRefused"
    space.kubectl("delete", "quota", "none")
    space.wait_pods(1)


def test_the_printer_columns_show_model_readiness_and_replicas(space: Space) -> None:
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    header, row = space.kubectl("get", "fgd", "chat").splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REASON", "REPLICAS", "DESIRED", "AGE"]
    assert row.split()[:-1] == ["chat", "file:///models/tiny.gguf", "True", "AllReplicasReady", "1", "1"]


def test_a_deleted_resource_is_removed_from_the_metrics(space: Space, operator: OperatorProcess) -> None:
    def shown() -> bool:
        return ("fastgen_operator_desired_replicas", f"chat/{space.name}") in operator.metrics()

    space.apply(resource())
    eventually(shown, within=20, what="the resource in the metrics")
    space.kubectl("delete", "fgd", "chat")
    eventually(lambda: not shown(), within=20, what="the resource out of the metrics")
