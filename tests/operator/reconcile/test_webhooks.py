"""A real mutating webhook rewrites the Deployment: writes are bounded, and a condition names the fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.everything import EVERYTHING
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.webhook import Mutation, Webhook, mirror_image, mutating
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

ENGINE = "spec.template.spec.containers[engine]"


def pod_of(deployment: Object) -> Any:
    return deployment["spec"]["template"]["spec"]


def add(deployment: Object) -> None:
    """Add a field, as a policy for spot nodes does."""
    pod_of(deployment)["tolerations"] = [{"key": "spot", "operator": "Exists"}]


def remove(deployment: Object) -> None:
    """Remove a field of the operator's."""
    pod_of(deployment)["containers"][0].pop("livenessProbe", None)


def written(space: Space, operator: OperatorProcess, hook: Webhook) -> int:
    """Return the number of writes of the Deployment during some reconciles, and check that its version stays."""
    before, version = len(hook.seen), space.get("deployment", "chat")["metadata"]["generation"]
    operator.let_resyncs_pass(8)
    assert space.get("deployment", "chat")["metadata"]["generation"] == version
    return len(hook.seen) - before


@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        (add, "spec.template.spec.tolerations"),
        (mirror_image, f"{ENGINE}.image"),
        (remove, f"{ENGINE}.livenessProbe"),
    ],
    ids=["an added field", "a changed value", "a removed field"],
)
def test_what_a_webhook_rewrites_is_named_and_not_written_again(
    mutate: Mutation, words: str, space: Space, operator: OperatorProcess, tmp_path: Path
) -> None:
    with mutating(space, tmp_path, mutate) as hook:
        space.apply(resource())
        space.finish_rollout()
        # It serves, so it is ready.
        space.wait_condition("Ready", "True", "AllReplicasReady")
        condition = space.wait_condition("TemplateUnmodified", "False", "RewrittenByWebhook")
        assert f"changed Deployment chat: {words}: to find it, run" in condition["message"]
        # The Deployment controller writes its status only.
        assert written(space, operator, hook) == 0
        space.patch("fgd/chat", {"spec": {"replicas": 2}})
        space.finish_rollout(count=2)
    (pod, other) = space.pods()
    space.kubectl("delete", "deployment", "chat", "--cascade=orphan", "--wait=false")  # the operator creates it again

    def restored() -> bool:
        names = {condition["type"] for condition in space.get("fgd", "chat")["status"]["conditions"]}
        return "TemplateUnmodified" not in names and not {"tolerations"} & space.template()["spec"].keys()

    eventually(restored, within=20, what="the operator's own template")
    (engine,) = space.template()["spec"]["containers"]
    assert (engine["image"], "livenessProbe" in engine) == ("engine:test", True)
    space.finish_rollout(count=2)
    assert {pod["metadata"]["name"], other["metadata"]["name"]}.isdisjoint(
        each["metadata"]["name"] for each in space.pods()
    ), "the pods of the webhook's template were adopted and replaced"


def queue(deployment: Object) -> None:
    """Mark the pods, as Kueue does with a Deployment that has a queue."""
    metadata = deployment["spec"]["template"]["metadata"]
    metadata.setdefault("annotations", {})["kueue.x-k8s.io/pod-suspending-parent"] = "deployment"


def test_what_kueue_adds_to_the_pods_is_neither_reported_nor_removed(
    space: Space, operator: OperatorProcess, tmp_path: Path
) -> None:
    owner = resource()
    owner["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    with mutating(space, tmp_path, queue) as hook:
        space.apply(owner)
        space.finish_rollout()
        space.wait_condition("Ready", "True", "AllReplicasReady")
        assert written(space, operator, hook) == 0
        space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
        space.finish_rollout()
    metadata = space.template()["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert metadata["annotations"]["kueue.x-k8s.io/pod-suspending-parent"] == "deployment"
    assert not space.condition("TemplateUnmodified")
    assert len(space.items("replicasets")) == 2


def test_a_spec_with_every_field_is_not_taken_for_a_rewritten_one(space: Space, operator: OperatorProcess) -> None:
    storage: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}
    volumes: list[Object] = [
        {"name": "map", "configMap": {"name": "a", "items": [{"key": "k", "path": "p"}]}},
        {"name": "secret", "secret": {"secretName": "a"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "a"}},
        {"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": storage}}},
        {"name": "down", "downwardAPI": {"items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "all", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}, {"secret": {"name": "s"}}]}},
        {"name": "driver", "csi": {"driver": "d"}},
    ]
    sidecar: Object = {
        **{"name": "side", "image": "side:1", "lifecycle": {"postStart": {"httpGet": {"port": 1}}}},
        "env": [
            {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "B", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "containerName": "side"}}},
        ],
        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi"}},
        "ports": [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}],
        "livenessProbe": {"exec": {"command": ["true"]}},
        "startupProbe": {"grpc": {"port": 1}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    patch: Object = {
        "spec": {"volumes": volumes, "containers": [sidecar], "initContainers": [{**sidecar, "name": "i"}]}
    }
    patch["spec"]["initContainers"][0].update(restartPolicy="Always", ports=[])
    space.apply({**resource(), "spec": EVERYTHING})
    space.apply(resource("other", podTemplate=patch))
    for name in ("chat", "other"):
        eventually(lambda name=name: space.get("deployment", name), within=20, what="the Deployment")
    operator.let_resyncs_pass(3)
    for name in ("chat", "other"):
        conditions = space.get("fgd", name)["status"]["conditions"]
        assert [each for each in conditions if each["type"] == "TemplateUnmodified"] == []
        assert {each["type"]: each["reason"] for each in conditions}["Progressing"] != "PodTemplateRefused"
