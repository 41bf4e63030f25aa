"""Adverse conditions: crashes, hangs, other writers, lost nodes. The status names the cause; few pods are created."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.objects.stored import Stored
from fastgen_operator.scale_down.order import DELETION_COST
from harness.adverse import (
    NO_GPU,
    bind,
    bury,
    crashed,
    dead_webhook,
    node,
    pods_made,
    schedule,
    silence,
)
from harness.engines import FakeEngine
from harness.loopback import LOOPBACK
from harness.process import OperatorProcess
from harness.space import NOW, Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

ONE_GPU: Object = {"engine": {"device": "cuda"}, "resources": {"gpu": {"count": 1}}}


@pytest.fixture
def bystander(space: Space, operator: OperatorProcess) -> Iterator[None]:
    """Another resource in the namespace, which must stay healthy and unchanged during the test."""
    del operator
    space.apply(resource("other"))
    space.make_ready("other")
    space.wait_condition("Ready", "True", "AllReplicasReady", "other")
    before = space.settled("other")
    yield
    assert space.versions("other") == before


def event_messages(space: Space) -> list[str]:
    return [event["message"] for event in space.items("events", fields="involvedObject.name=chat")]


@pytest.mark.usefixtures("bystander")
def test_a_crash_after_loading_is_quoted_and_creates_no_more_pods(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    pod = space.wait_pods(1)[0]
    for restarts in range(1, 8):
        space.set_pod(pod, ready=False, container=crashed(restarts, f"step {restarts}\nCUDA error: illegal access\n"))
    condition = space.wait_condition("Ready", "False", "CrashLoopBackOff")
    assert (
        "the engine ended with exit code 1 (Error); last log line: CUDA error: illegal access" in condition["message"]
    )
    operator.let_resyncs_pass(2)
    assert pods_made(space) == 2, "one of each resource"


def test_an_engine_that_crashes_after_its_first_token_is_not_ready_between_crashes(space: Space) -> None:
    space.apply(resource())
    pod = space.wait_pods(1)[0]
    just_now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    alive = {"state": {"running": {"startedAt": NOW}}, "started": True}
    space.set_pod(pod, ready=True, container={**crashed(4, "bang", finished=just_now), **alive})
    condition = space.wait_condition("Ready", "False", "CrashLoopBackOff")
    assert condition["message"].endswith("last log line: bang; restarted 4 times")
    assert space.condition("Available")["status"] == "True", "what passes its probe now is counted"
    assert pods_made(space) == 1


def test_a_rollout_without_progress_quotes_the_pod_and_is_replaced_by_the_next(space: Space) -> None:
    deadline: Object = {"startupDeadlineSeconds": 10, "rollout": {"progressDeadlineSeconds": 10}}
    space.apply(resource(**deadline))
    stuck = space.wait_pods(1)[0]
    space.set_pod(stuck, ready=False)
    condition = eventually(
        lambda: (c := space.condition("Progressing"))["reason"] == "ProgressDeadlineExceeded" and c,
        within=40,
        what="the deadline",
    )
    assert condition
    assert (
        f"no progress in 10 s; pod {stuck['metadata']['name']}: the engine has been loading since {NOW}"
        in condition["message"]
    )
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
    eventually(
        lambda: [pod["metadata"]["name"] for pod in space.pods()] not in ([], [stuck["metadata"]["name"]]),
        within=20,
        what="the next revision in the place of the stuck one",
    )
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert pods_made(space) == 2


def test_a_new_revision_gets_the_gpu_of_a_crashing_pod(space: Space, plane: ControlPlane) -> None:
    """One GPU for two replicas: the Deployment controller deletes the pending old pod, and is then stuck forever."""
    with node(plane, "scarce"):
        space.apply(resource(replicas=2, **ONE_GPU))
        space.wait_pods(2)
        schedule(space, "scarce")
        (first,) = [pod for pod in space.pods() if pod["spec"].get("nodeName")]
        space.set_pod(first, ready=False, container=crashed(6, "bang"))
        short = space.wait_condition("PodsScheduled", "False", "InsufficientGPU")
        assert "a replica needs 1 nvidia.com/gpu, and the node with the most free has 0 of its 1" in short["message"]
        space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})

        def is_succeeded() -> bool:
            bury(space)
            schedule(space, "scarce")
            holders = [pod["metadata"]["name"] for pod in space.pods() if pod["spec"].get("nodeName")]
            return holders not in ([], [first["metadata"]["name"]])

        eventually(is_succeeded, within=40, what="a pod of the newer revision with the GPU", every=0.5)

        def is_announced() -> bool:
            return any("may have 2 pods unavailable from now on (1 before)" in words for words in event_messages(space))

        eventually(is_announced, within=20, what="the Event")

        def as_asked() -> bool:
            strategy = space.get("deployment", "chat")["spec"]["strategy"]
            return bool(strategy["rollingUpdate"]["maxUnavailable"] == 1)

        eventually(as_asked, within=20, what="the spec's maxUnavailable again")
        assert pods_made(space) == 4, "two of each revision"
        space.kubectl("delete", "fgd", "chat")

        def is_empty() -> bool:
            bury(space)
            return space.items("pods") == []

        eventually(is_empty, within=20, what="an empty node", every=0.5)


def test_a_pod_on_a_vanished_node_is_replaced_once_and_does_not_count(space: Space, plane: ControlPlane) -> None:
    with node(plane, "vanishing"):
        space.apply(resource(**ONE_GPU))
        lost = space.wait_pods(1)[0]
        schedule(space, "vanishing")
        space.set_pod(lost, ready=True)
        space.wait_condition("Ready", "True", "AllReplicasReady")
        unreachable = {"type": "Ready", "status": "False", "reason": "NodeStatusUnknown", "lastTransitionTime": NOW}
        others = [condition for condition in space.pods()[0]["status"]["conditions"] if condition["type"] != "Ready"]
        patch = {"status": {"conditions": [*others, unreachable]}}
        space.patch(f"pod/{lost['metadata']['name']}", patch, "status")
        condition = space.wait_condition("Ready", "False", "ReplicasNotReady")
        assert "its node vanishing does not respond" in condition["message"]
        space.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=false")  # as the eviction would
        space.set_unschedulable(space.wait_pods(1)[0], NO_GPU)
        condition = space.wait_condition("PodsScheduled", "False", "InsufficientGPU")
        assert f"pod {lost['metadata']['name']} on node vanishing still holds its resources" in condition["message"]
        space.make_ready()
        space.wait_condition("Ready", "True", "AllReplicasReady")
        assert pods_made(space) == 2
        bury(space)


# As the default of Kubernetes, without the wait of 300 seconds.
EVICTED_AT_ONCE: Object = {
    **{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
    "tolerationSeconds": 0,
}


@pytest.mark.usefixtures("bystander")
def test_replicas_of_a_lost_node_wait_for_their_volume_and_start_elsewhere_when_the_node_is_removed(
    space: Space, plane: ControlPlane
) -> None:
    """The node's pods are Terminating for as long as its Node object exists."""
    # If no node were left, the node controller would blame the network, and evict nothing.
    with node(plane, "spared"), node(plane, "lost"):
        space.apply(
            resource(
                replicas=2,
                model={"source": "hf://tests/tiny"},
                cache={"size": "1Gi", "preload": False},
                scheduling={"tolerations": [EVICTED_AT_ONCE]},
            )
        )
        for pod in space.wait_pods(2):
            bind(space, pod, "lost")
            space.set_downloaded(pod)
        space.wait_condition("Ready", "True", "AllReplicasReady")
        silence(space, "lost")

        def leaving() -> list[str]:
            pods = space.items("pods", labels="fastgen.dev/deployment=chat")
            return [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("deletionTimestamp")]

        eventually(lambda: len(leaving()) == 2, within=30, what="the eviction of both pods")
        waiting = space.wait_pods(2)
        for pod in waiting:
            space.set_unschedulable(pod, NO_GPU)
        condition = space.wait_condition("Ready", "False", "VolumeOnOneNode")
        assert "all replicas must run on node lost" in condition["message"]
        assert f"pod {min(leaving())} on node lost still holds its resources" in condition["message"]

        def supply() -> Object:
            found: Object = space.get("fgd", "chat")["status"]["supply"]
            return found

        eventually(lambda: supply()["draining"] == 2, within=20, what="two pods that are being deleted")
    # The pod garbage collector removes the pods of a node that does not exist.
    bury(space)
    for pod in space.wait_pods(2, replaced={pod["metadata"]["name"] for pod in waiting}):
        space.set_downloaded(pod)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert pods_made(space) == 2 + 2 + 2 + 1, "and the one of the other resource"


@pytest.mark.usefixtures("bystander")
def test_restores_against_another_writer_back_off_and_are_reported(space: Space) -> None:
    space.apply(resource())
    space.wait_pods(1)

    def contended() -> bool:
        space.patch("deployment/chat", {"spec": {"progressDeadlineSeconds": 77}})
        return space.condition("Progressing").get("reason") == "Contended"

    eventually(contended, within=40, what="the fight in the status", every=0.5)
    condition = space.wait_condition("Ready", "False", "Contended")
    assert "another writer keeps changing spec.progressDeadlineSeconds of Deployment chat" in condition["message"]

    def restores() -> list[str]:
        return [words for words in event_messages(space) if words.startswith("Deployment chat restored: ")]

    eventually(restores, within=20, what="the Event")
    assert len(restores()) == 1, "what repeats itself is counted"

    def restored() -> bool:
        return bool(space.get("deployment", "chat")["spec"]["progressDeadlineSeconds"] == 1800)

    eventually(restored, within=40, what="the last word")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_a_paused_deployment_stays_paused_and_is_reported(space: Space) -> None:
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.kubectl("rollout", "pause", "deployment/chat")
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
    condition = space.wait_condition("Ready", "False", "DeploymentPaused")
    assert "kubectl rollout resume deployment/chat" in condition["message"]
    assert space.get("fgd", "chat")["status"]["readyReplicas"] == 0, "the pod that serves is an old one"
    space.kubectl("rollout", "resume", "deployment/chat")
    space.wait_condition("Progressing", "True", "RollingOut")
    eventually(lambda: pods_made(space) == 2, within=20, what="a pod of the newest revision")
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_pods_rejected_by_an_unreachable_webhook_are_reported_and_created_after_its_removal(space: Space) -> None:
    with dead_webhook(space, "", "pods"):
        space.apply(resource())
        condition = space.wait_condition("Ready", "False", "ReplicaFailure")
        assert "failed calling webhook" in condition["message"]
        assert pods_made(space) == 0
    eventually(lambda: len(space.pods()) == 1, within=40, what="the pod")


def test_a_child_rejected_by_an_unreachable_webhook_is_reported_and_created_after_its_removal(
    space: Space, operator: OperatorProcess
) -> None:
    with dead_webhook(space, "apps", "deployments"):
        space.apply(resource())
        condition = space.wait_condition("Ready", "False", "ApplyRefused")
        assert "the Deployment was refused: " in condition["message"]
        assert "failed calling webhook" in condition["message"]
    space.wait_pods(1)
    assert operator.failed_reconciles(space.name) == []


def test_nothing_is_written_to_a_namespace_that_is_being_deleted(space: Space, operator: OperatorProcess) -> None:
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["fastgen.test/held"]}}
    space.apply(held)
    for number in range(3):
        space.apply(resource(f"chat{number}"))
    for number in range(3):
        space.wait_pods(1, f"chat{number}")
    space.cluster.kubectl("delete", "namespace", space.name, "--wait=false")
    eventually(
        lambda: space.items("fgd,deployments,services,replicasets") == [], within=40, what="the end of all but one"
    )
    shown = ("fastgen_operator_desired_replicas", f"chat0/{space.name}")
    eventually(lambda: shown not in operator.metrics(), within=20, what="a reconcile that finds nothing to do")
    try:
        assert space.items("fgd,deployments,services,replicasets,pods") == []
        assert f"{space.name}/" not in "".join(
            line for line in operator.log.read_text().splitlines() if "WARNING" in line or "ERROR" in line
        )
    finally:
        space.patch("configmap/held", {"metadata": {"finalizers": None}})


def test_a_scale_down_deletes_the_pods_with_the_fewest_tokens_in_flight(space: Space) -> None:
    backlogs = {next(LOOPBACK): backlog for backlog in (700.0, 20.0, 0.0)}
    space.apply(resource(replicas=3))
    pods = sorted(space.wait_pods(3), key=lambda pod: str(pod["metadata"]["name"]))
    with contextlib.ExitStack() as stack:
        for pod, (address, backlog) in zip(pods, backlogs.items(), strict=True):
            engine = FakeEngine(address, backlog=backlog).start()
            stack.callback(engine.close)
            space.set_pod(pod, ready=True)
            body: Object = {"status": {"podIP": address, "podIPs": [{"ip": address}]}}
            space.patch(f"pod/{pod['metadata']['name']}", body, "status")
        space.wait_condition("Ready", "True", "AllReplicasReady")
        written = [Stored(pod).annotations for pod in space.pods()]
        assert not [each for each in written if DELETION_COST in each], "nothing is written before it matters"
        space.kubectl("scale", "fgd/chat", "--replicas=1")
        (left,) = space.wait_pods(1)
    assert left["metadata"]["name"] == pods[0]["metadata"]["name"]
    assert left["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "1700"
