"""Conditions for pods whose status the test sets, against a real API server and controllers."""

from __future__ import annotations

import pytest

from fastgen_operator.kinds import POD
from harness.adverse import quota
from harness.process import OperatorProcess
from harness.space import NOW, Space, resource
from support.waiting import eventually

CHILDREN = ("serviceaccount", "service", "networkpolicy", "poddisruptionbudget", "deployment")

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]


def test_ready_follows_the_readiness_of_the_pod(space: Space) -> None:
    space.apply(resource())
    pod = space.wait_pods(1)[0]
    space.wait_condition("Ready", "False", "ReplicasNotReady")
    space.set_pod(pod, ready=True)
    condition = space.wait_condition("Ready", "True", "AllReplicasReady")
    assert condition["message"] == "1 of 1 replicas ready"
    for kind in ("PodsScheduled", "Progressing", "Available"):
        assert space.condition(kind)["status"] == "True", kind
    assert space.get("fgd", "chat")["status"]["url"] == f"http://chat.{space.name}.svc:8000/v1"

    def counted() -> bool:
        status = space.get("fgd", "chat")["status"]
        return (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)

    eventually(counted, within=20, what="one replica, ready and updated")  # `replicas` is the Deployment's own count
    space.set_pod(pod, ready=False)
    space.wait_condition("Ready", "False", "ReplicasNotReady")
    space.set_pod(pod, ready=True)
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_every_condition_is_set_from_the_first_reconcile(space: Space) -> None:
    space.apply(resource())
    eventually(lambda: space.condition("Ready"), within=20, what="a first status")
    conditions = space.get("fgd", "chat")["status"]["conditions"]
    assert [condition["type"] for condition in conditions] == [
        "Ready",
        "ModelCached",
        "PodsScheduled",
        "Progressing",
        "Available",
        "ScalingActive",
        "ScalingLimited",
        "ReplicasUniform",
    ]
    assert all(condition["reason"] and condition["message"] for condition in conditions)


def test_a_pod_without_a_gpu_shows_the_schedulers_message(space: Space) -> None:
    space.apply(resource("big", engine={"device": "cuda"}, resources={"gpu": {"count": 1}}))
    space.apply(resource("small"))
    words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    space.set_unschedulable(space.wait_pods(1, "big")[0], words)
    space.make_ready("small")
    condition = space.wait_condition("PodsScheduled", "False", "InsufficientGPU", "big")
    assert words in condition["message"]
    assert space.condition("Ready", "big")["reason"] == "InsufficientGPU"
    space.wait_condition("Ready", "True", "AllReplicasReady", "small")
    limits = space.pods("big")[0]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1"}


def test_a_pod_that_cannot_be_scheduled_for_another_reason_is_unschedulable(space: Space) -> None:
    space.apply(resource(engine={"device": "cuda"}, resources={"gpu": {"count": 1}}))
    space.set_unschedulable(space.wait_pods(1)[0], "0/1 nodes are available: 1 Insufficient memory.")
    space.wait_condition("PodsScheduled", "False", "Unschedulable")


def test_ready_pods_of_an_older_template_do_not_count(space: Space) -> None:
    space.apply(resource(replicas=2))
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
    space.wait_condition("Ready", "False", "ReplicasNotReady")
    expected = "0 of 2 replicas ready (1 of an older revision still serves); pod "
    # The new pod is named once it exists.
    eventually(
        lambda: space.condition("Ready")["message"].startswith(expected), within=20, what=f"a message with {expected!r}"
    )
    assert space.condition("Progressing")["reason"] == "RollingOut"
    # There is no spare capacity: one old pod was removed, the other still serves.
    ready = [pod for pod in space.wait_pods(2) if "containerStatuses" in pod["status"]]
    assert len(ready) == 1
    for _ in range(2):
        for pod in space.wait_pods(2):
            if "containerStatuses" not in pod["status"]:  # an old pod is removed when a new one is ready
                space.set_pod(pod, ready=True)
        eventually(lambda: space.get("fgd", "chat")["status"]["readyReplicas"] >= 1, within=20, what="a new ready pod")
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.wait_condition("Progressing", "True", "RolloutComplete")


def test_a_newer_revision_replaces_a_stuck_one_without_spare_capacity(space: Space) -> None:
    space.apply(resource())
    stuck = space.wait_pods(1)[0]
    space.set_pod(stuck, ready=False, container=_ended(2, "fastgen: --token-budget 256: no\n"))
    space.wait_condition("Progressing", "False", "BadConfiguration")
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})

    def replaced() -> bool:
        return [pod["metadata"]["name"] for pod in space.pods()] not in ([], [stuck["metadata"]["name"]])

    eventually(replaced, within=20, what="a pod of the newer revision in the place of the stuck one")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_an_engine_that_rejects_its_configuration_is_quoted(space: Space) -> None:
    space.apply(resource())
    words = "fastgen: error: /models/tiny.gguf: no such file; give the path of a GGUF file"
    space.set_pod(space.wait_pods(1)[0], ready=False, container=_ended(2, f"loading\n{words}\n\n"))
    condition = space.wait_condition("Ready", "False", "BadConfiguration")
    assert condition["message"].endswith(words)


def test_an_image_that_cannot_be_pulled_is_named(space: Space) -> None:
    space.apply(resource())
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    space.set_pod(space.wait_pods(1)[0], ready=False, container={"state": waiting, "lastState": {}})
    condition = space.wait_condition("Ready", "False", "ImagePullBackOff")
    assert "the image engine:test of the engine cannot be pulled: not found" in condition["message"]


def test_the_admission_message_of_rejected_pods_is_shown(space: Space) -> None:
    quota(space, POD, "pods=0")
    space.apply(resource())
    condition = space.wait_condition("Ready", "False", "ReplicaFailure")
    assert "exceeded quota: none" in condition["message"]


def test_events_are_recorded_on_transitions_only(space: Space, operator: OperatorProcess) -> None:
    def reasons() -> list[str]:
        events = space.items("events", fields="involvedObject.kind=FastGenDeployment")
        return sorted(event["reason"] for event in events)

    space.apply(resource())
    space.wait_condition("Ready", "False", "ReplicasNotReady")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    expected = ["AllReplicasReady", "Applied", "ReplicasNotReady"]
    eventually(lambda: reasons() == expected, within=20, what="the events of a first start")
    operator.let_resyncs_pass(3)
    assert reasons() == expected
    (message,) = [event["message"] for event in space.items("events") if event["reason"] == "Applied"]
    assert message.endswith(" chat created")
    for kind in CHILDREN:
        made = len(space.items(kind, labels="fastgen.dev/deployment=chat"))
        assert message.lower().count(f"{kind} chat") == made, "one Event names all new children"


def _ended(code: int, message: str) -> dict[str, object]:
    terminated = {"exitCode": code, "reason": "Error", "message": message, "startedAt": NOW, "finishedAt": NOW}
    return {"state": {"terminated": terminated}}
