"""Conditions as a table: observed pods and Deployment, and the resulting condition."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from itertools import permutations
from typing import Any

import pytest

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.supply import LoadingStage
from fastgen_operator.kinds import DEPLOYMENT, Key, Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Problem
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.plan.situation import NodeGPUs, Situation
from fastgen_operator.plan.subject import subject_of
from fastgen_operator.status.conditions.available import AVAILABLE
from fastgen_operator.status.conditions.condition import merge_conditions
from fastgen_operator.status.conditions.exposed import EXPOSED
from fastgen_operator.status.conditions.headroom_reserved import HEADROOM_RESERVED
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED, pods_short_of_gpus
from fastgen_operator.status.conditions.progressing import PROGRESSING
from fastgen_operator.status.conditions.ready import READY
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE
from fastgen_operator.status.conditions.table import ORDER, all_conditions, unread_conditions
from fastgen_operator.status.conditions.template_unmodified import TEMPLATE_UNMODIFIED
from fastgen_operator.status.scheduler_words import NODE_CONFLICT
from harness.objects import container, leaving, observed, pod, situation, stored

GPU = stored(resources={"gpu": {"count": 2}})
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
CACHED = stored(model={"source": "hf://a/b"}, cache={"size": "1Gi"})
ONE_NODE: Object = {"model": {"source": "hf://a/b"}, "cache": {"size": "1Gi"}, "resources": {"gpu": {"count": 1}}}
UNBINDABLE = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
TAINTED = "0/1 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}."
SHARED = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.shared."
NO_MEMORY = "0/1 nodes are available: 1 Insufficient memory"
DONE: Object = {"conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]}
LATE: Object = {"conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]}
REFUSED: Object = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}
TERMINATING = leaving(pod(ready=True))
LOADING = pod(**container(state={"running": {"startedAt": "T1"}}))
EVICTED: dict[str, Any] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def ended(code: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": "Error", "message": message}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def gated(
    *gates: str,
    queue: str | None = "gpus",
    reason: str = "SchedulingGated",
    message: str = "Scheduling is blocked due to non-empty scheduling gates",
) -> Object:
    """Return a pod behind these scheduling gates, in a queue of Kueue; or one that is unbound for another reason."""
    found = pod(scheduled=message)
    found["spec"]["schedulingGates"] = [{"name": name} for name in gates]
    if queue:
        found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue
    found["status"]["conditions"][-1]["reason"] = reason
    return found


def growing(*pods: Object, **spec: Any) -> Situation:
    """Return a fleet with minReplicas 1 that the autoscaler scales to two replicas."""
    owner = stored(autoscaling={"minReplicas": 1, "maxReplicas": 4}, **spec)
    return situation(observed(*pods, owner=owner), decision=Decision(2))


def exposed(
    *pods: Object, minimum: int = 0, wanted: int | None = 0, has_gateway: bool = True, holder: Key | None = None
) -> Situation:
    """Return a fleet with minReplicas 0 behind the gateway, for which the autoscaler wants this many replicas."""
    owner = stored(autoscaling={"minReplicas": minimum, "maxReplicas": 4}, gateway={"expose": True})
    seen = replace(observed(*pods, owner=owner), name_holder=holder)
    return situation(seen, decision=None if wanted is None else Decision(wanted), has_gateway=has_gateway)


# A model that each pod downloads, and the status of a pod that has it.
DOWNLOADED_BY_PODS: Object = {"model": {"source": "hf://a/b"}}
HAS_MODEL: Object = {"initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 0}}}]}

# Name; observed state; condition type; expected status, reason and part of the message.
TABLE: list[tuple[str, Observed | Situation, str, str, str, str]] = [
    ("no pod yet", observed(), PODS_SCHEDULED, "Unknown", "NoPods", "no pod"),
    ("a new pod", observed(pod(scheduled="")), PODS_SCHEDULED, "Unknown", "WaitingForScheduler", "1 of 1"),
    (
        "a node was chosen, and the pod could not be bound to it",
        observed(gated("a", reason="SchedulerError", message=UNBINDABLE)),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        UNBINDABLE,
    ),
    (
        "the reason of another scheduler",
        observed(gated("a", reason="Undetermined", message="waiting for the group")),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        "waiting for the group",
    ),
    ("a pod on a node", observed(pod()), PODS_SCHEDULED, "True", "AllScheduled", "1 of 1"),
    ("no GPU", observed(pod(scheduled=NO_GPU), owner=GPU), PODS_SCHEDULED, "False", "InsufficientGPU", NO_GPU),
    ("no memory", observed(pod(scheduled=NO_MEMORY), owner=GPU), PODS_SCHEDULED, "False", "Unschedulable", NO_MEMORY),
    (
        "a taint with the GPU's name",
        observed(pod(scheduled=TAINTED), owner=GPU),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        TAINTED,
    ),
    (
        "another GPU resource",
        observed(pod(scheduled=SHARED), owner=GPU),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        SHARED,
    ),
    (
        "a missing GPU that the spec does not request",
        observed(pod(scheduled=NO_GPU)),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        NO_GPU,
    ),
    (
        "a GPU and memory missing: the GPU is reported",
        observed(pod(scheduled=NO_MEMORY), pod(scheduled=NO_GPU), owner=GPU),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        "2 of 2",
    ),
    (
        "a pod that Kueue holds back",
        observed(gated("kueue.x-k8s.io/admission"), pod(), pod(scheduled="")),
        PODS_SCHEDULED,
        "False",
        "SchedulingGated",
        "1 of 3 pods held back; pod chat-new-x: held by the scheduling gate kueue.x-k8s.io/admission: Kueue has not "
        "admitted it to the queue gpus",
    ),
    (
        "a pod that Kueue holds back without a queue",
        observed(gated("kueue.x-k8s.io/admission", queue=None)),
        PODS_SCHEDULED,
        "False",
        "SchedulingGated",
        "it names no queue: set the label kueue.x-k8s.io/queue-name",
    ),
    (
        "a pod behind other gates",
        observed(gated("a", "b")),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "0 of 1 replicas ready; pod chat-new-x: held by the scheduling gate a and b: see the controller that added it",
    ),
    (
        "a gate and a missing GPU",
        observed(gated("kueue.x-k8s.io/admission"), pod(scheduled=NO_GPU), owner=GPU),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        "1 of 2",
    ),
    (
        "growth that Kueue holds back",
        growing(pod(ready=True), gated("kueue.x-k8s.io/admission")),
        AVAILABLE,
        "True",
        "ScalingUp",
        "Kueue has not admitted it",
    ),
    (
        "an old pod without a node",
        observed(pod("old", scheduled=NO_GPU), pod()),
        PODS_SCHEDULED,
        "True",
        "AllScheduled",
        "",
    ),
    ("nothing wanted", observed(owner=stored(replicas=0)), PODS_SCHEDULED, "True", "ScaledToZero", ""),
    ("a rollout", observed(pod()), PROGRESSING, "True", "RollingOut", "1 of 1 pods"),
    ("a complete rollout", observed(pod(), **DONE), PROGRESSING, "True", "RolloutComplete", ""),
    (
        "a complete rollout with an old pod left",
        observed(pod(), replicas=2, **DONE),
        PROGRESSING,
        "True",
        "RollingOut",
        "1 of older",
    ),
    ("no progress", observed(pod(), **LATE), PROGRESSING, "False", "ProgressDeadlineExceeded", ""),
    ("rejected pods", observed(**REFUSED), PROGRESSING, "False", "ReplicaFailure", "exceeded quota"),
    (
        "no image",
        observed(pod(**container(state=waiting("ImagePullBackOff", "denied")))),
        PROGRESSING,
        "False",
        "ImagePullBackOff",
        "denied",
    ),
    (
        "a container that cannot be created",
        observed(pod(**container(state=waiting("CreateContainerConfigError", "non-root")))),
        PROGRESSING,
        "False",
        "ContainerNotCreated",
        "non-root",
    ),
    (
        "exit code 2",
        observed(pod(**container(state=ended(2, "a\nbad path\n")))),
        PROGRESSING,
        "False",
        "BadConfiguration",
        "x: bad path",
    ),
    (
        "exit code 2, then restarted",
        observed(pod(**container(state={"running": {}}, lastState=ended(2, "bad path")))),
        PROGRESSING,
        "False",
        "BadConfiguration",
        "bad path",
    ),
    (
        "an engine that hung",
        observed(pod(**container(restarts=1, state={"running": {}}, lastState=ended(4, "no step for 60 s")))),
        PROGRESSING,
        "False",
        "EngineHung",
        "no step for 60 s",
    ),
    ("a first crash", observed(pod(**container(state=ended(137)))), PROGRESSING, "True", "RollingOut", ""),
    (
        "back-off after crashes",
        observed(pod(**container(restarts=1, state=waiting("CrashLoopBackOff"), lastState=ended(139, "segfault")))),
        PROGRESSING,
        "False",
        "CrashLoopBackOff",
        "exit code 139 (Error); last log line: segfault",
    ),
    (
        "between two crashes",
        observed(pod(**container(restarts=3, state={"running": {}}, lastState=ended(1)))),
        PROGRESSING,
        "False",
        "CrashLoopBackOff",
        "exit code 1",
    ),
    (
        "repeated evictions",
        observed(*(pod(name=str(n), **EVICTED) for n in range(3)), pod(name="3")),
        PROGRESSING,
        "False",
        "PodsFailed",
        "3 pods were evicted or rejected by their nodes; pod chat-new-2: Evicted: The node was low",
    ),
    (
        "evictions without a successor",
        observed(*(pod(name=str(n), **EVICTED) for n in range(3)), replicas=0, updatedReplicas=0),
        PROGRESSING,
        "False",
        "PodsFailed",
        "3 pods were evicted or rejected by their nodes",
    ),
    (
        "evictions, and no successor is allowed",
        observed(*(pod(name=str(n), **EVICTED) for n in range(3)), replicas=0, updatedReplicas=0, **REFUSED),
        PROGRESSING,
        "False",
        "ReplicaFailure",
        "exceeded quota",
    ),
    (
        "evictions before the fleet was scaled to 0",
        observed(
            *(pod(name=str(n), **EVICTED) for n in range(3)), owner=stored(replicas=0), replicas=0, updatedReplicas=0
        ),
        PROGRESSING,
        "True",
        "RollingOut",
        "",
    ),
    (
        "evictions in the past",
        observed(*(pod(name=str(n), **EVICTED) for n in range(3)), pod(name="3", ready=True), replicas=1),
        PROGRESSING,
        "True",
        "RollingOut",
        "",
    ),
    (
        "a late pod's state",
        observed(pod(**container(state={"running": {"startedAt": "T1"}})), **LATE),
        PROGRESSING,
        "False",
        "ProgressDeadlineExceeded",
        "no progress in 1800 s; pod chat-new-x: the engine has been loading since T1; /ready has not passed yet",
    ),
    (
        "two failing pods",
        observed(*(pod(name=n, **container(state=waiting("ErrImagePull", "denied"))) for n in "ba")),
        PROGRESSING,
        "False",
        "ImagePullBackOff",
        "pod chat-new-a: the image engine:test of the engine cannot be pulled: denied (1 more fails)",
    ),
    (
        "a GPU held by a terminating pod",
        observed(leaving(pod("old", ready=True)), pod(scheduled=NO_GPU), owner=GPU),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        "pod chat-old-x on node n1 still holds its resources: it terminates by 2026-01-01T00:01:30Z",
    ),
    (
        "a rollout that needs a spare GPU",
        observed(
            pod("old", ready=True),
            pod(scheduled=NO_GPU),
            owner=stored(resources={"gpu": {"count": 1}}, rollout={"maxSurge": 1, "maxUnavailable": 0}),
        ),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        "set maxSurge to 0 and maxUnavailable to 1",
    ),
    (
        "pods on the node of their volume",
        observed(pod(name="a"), pod(name="b"), owner=stored(replicas=2, **ONE_NODE)),
        PODS_SCHEDULED,
        "True",
        "AllScheduled",
        "2 of 2 pods scheduled, all on node n1, because the volume chat is ReadWriteOnce",
    ),
    (
        "no room on the node of the volume",
        observed(pod(name="a", ready=True), pod(name="b", scheduled=NO_GPU), owner=stored(replicas=2, **ONE_NODE)),
        PODS_SCHEDULED,
        "False",
        "VolumeOnOneNode",
        "; all replicas must run on node n1, because the volume chat is ReadWriteOnce: run fewer replicas, or remove "
        "spec.cache and add it again with accessMode ReadWriteMany",
    ),
    (
        "no room for the first pod: any node would do",
        observed(pod(scheduled=NO_GPU), owner=stored(**ONE_NODE)),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        NO_GPU,
    ),
    (
        "a download that holds the volume",
        replace(observed(pod(scheduled=NO_GPU), owner=stored(**ONE_NODE)), fetch_pods=(Pod(pod("fetch")),)),
        PODS_SCHEDULED,
        "False",
        "VolumeOnOneNode",
        "must run on node n1",
    ),
    (
        "the node of the volume is being drained",
        observed(leaving(pod(name="a")), pod(name="b", scheduled=NO_GPU), owner=stored(**ONE_NODE)),
        PODS_SCHEDULED,
        "False",
        "VolumeOnOneNode",
        "ReadWriteOnce; pod chat-new-a on node n1 still holds its resources: it terminates by 2026-01-01T00:01:30Z",
    ),
    (
        "the node of the volume is lost",
        situation(
            observed(leaving(pod(name="a")), pod(name="b", scheduled=NO_GPU), owner=stored(**ONE_NODE)),
            now=datetime.fromisoformat("2026-01-01T00:02:31Z"),
        ),
        PODS_SCHEDULED,
        "False",
        "VolumeOnOneNode",
        "kubectl taint node n1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    ),
    (
        "a volume in a zone without room",
        observed(pod(scheduled=f"0/1 nodes are available: 1 {NODE_CONFLICT}."), owner=stored(**ONE_NODE)),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        "select nodes that fit the replicas with spec.scheduling.nodeSelector",
    ),
    (
        "a shared volume",
        observed(
            pod(name="a"),
            pod(name="b", scheduled=NO_GPU),
            owner=stored(**{**ONE_NODE, "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}),
        ),
        PODS_SCHEDULED,
        "False",
        "InsufficientGPU",
        NO_GPU,
    ),
    (
        "a download without room on the node of the replicas",
        replace(observed(pod("old"), owner=CACHED), fetch_pods=(Pod(pod(scheduled=NO_MEMORY)),)),
        MODEL_CACHED,
        "False",
        "VolumeOnOneNode",
        "it must run on node n1, where the replicas hold the ReadWriteOnce volume chat: make room on that node",
    ),
    (
        "one unready pod of two",
        observed(pod(name="a", ready=True), pod(name="b", scheduled=""), owner=stored(replicas=2)),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "1 of 2 replicas ready; pod chat-new-b: waits for the scheduler",
    ),
    (
        "old pods that still serve",
        observed(pod("old", ready=True), pod(scheduled=NO_GPU), owner=stored(replicas=2)),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "0 of 2 replicas ready (1 of an older revision still serves)",
    ),
    ("an unready pod", observed(pod()), AVAILABLE, "False", "ReplicasNotReady", "0 of 1"),
    ("a ready pod", observed(pod(ready=True)), AVAILABLE, "True", "AllReplicasReady", "1 of 1"),
    ("an old ready pod", observed(pod("old", ready=True), pod()), AVAILABLE, "False", "ReplicasNotReady", "0 of 1"),
    ("a ready pod that terminates", observed(TERMINATING), AVAILABLE, "False", "ReplicasNotReady", "0 of 1"),
    (
        "an evicted pod and its replacement",
        observed(pod(phase="Failed", **container(state=ended(2, "evicted"))), pod()),
        PROGRESSING,
        "True",
        "RollingOut",
        "",
    ),
    (
        "one pod of two",
        observed(pod(ready=True), owner=stored(replicas=2)),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "1 of 2",
    ),
    (
        "an added replica that starts",
        growing(pod(ready=True), pod(name="b", **container(state={"running": {"startedAt": "x"}}))),
        AVAILABLE,
        "True",
        "ScalingUp",
        "1 of 2 replicas ready; pod chat-new-b: the engine has been loading since x",
    ),
    (
        "an engine that says what it does while it loads",
        situation(observed(LOADING), loading_stage=LoadingStage("chat-new-x", "T1", "loading weights 40 %")),
        READY,
        "False",
        "ReplicasNotReady",
        "0 of 1 replicas ready; pod chat-new-x: the engine has been loading since T1: loading weights 40 %",
    ),
    (
        "what an earlier container of the pod said",
        situation(observed(LOADING), loading_stage=LoadingStage("chat-new-x", "T0", "loading weights 40 %")),
        READY,
        "False",
        "ReplicasNotReady",
        "the engine has been loading since T1; /ready has not passed yet",
    ),
    (
        "what another pod says",
        situation(observed(LOADING), loading_stage=LoadingStage("chat-new-y", "T1", "loading weights 40 %")),
        READY,
        "False",
        "ReplicasNotReady",
        "the engine has been loading since T1; /ready has not passed yet",
    ),
    (
        "an added replica without a pod yet",
        growing(pod(ready=True)),
        AVAILABLE,
        "True",
        "ScalingUp",
        "1 of 2 replicas ready",
    ),
    (
        "an added replica that waits for a node",
        growing(pod(ready=True), pod(name="b", scheduled=NO_GPU)),
        AVAILABLE,
        "True",
        "ScalingUp",
        f"1 of 2 replicas ready; pod chat-new-b: {NO_GPU}",
    ),
    (
        "an added replica that waits for a node, and then for its model",
        growing(pod(ready=True, **HAS_MODEL), pod(name="b", scheduled=NO_GPU), **DOWNLOADED_BY_PODS),
        READY,
        "True",
        "ScalingUp",
        f"1 of 2 replicas ready; pod chat-new-b: {NO_GPU}",
    ),
    (
        "an added replica that Kueue holds back, and that will download its model",
        growing(pod(ready=True, **HAS_MODEL), gated("kueue.x-k8s.io/admission"), **DOWNLOADED_BY_PODS),
        READY,
        "True",
        "ScalingUp",
        "Kueue has not admitted it",
    ),
    (
        "no GPU for a pod that will download its model",
        observed(pod(scheduled=NO_GPU), owner=stored(**DOWNLOADED_BY_PODS, resources={"gpu": {"count": 1}})),
        READY,
        "False",
        "InsufficientGPU",
        NO_GPU,
    ),
    (
        "no GPU for a pod that will download its model: the download",
        observed(pod(scheduled=NO_GPU), owner=stored(**DOWNLOADED_BY_PODS)),
        MODEL_CACHED,
        "Unknown",
        "Downloading",
        "1 of 1 pods download hf://a/b when they have a node",
    ),
    (
        "a pod that will download its model to a claim without a volume",
        observed(pod(scheduled=UNBOUND), owner=stored(**DOWNLOADED_BY_PODS, cache={"size": "1Gi", "preload": False})),
        READY,
        "False",
        "VolumeNotBound",
        UNBOUND,
    ),
    (
        "one that waits for a node is ready",
        growing(pod(ready=True), pod(name="b", scheduled=NO_GPU)),
        READY,
        "True",
        "ScalingUp",
        NO_GPU,
    ),
    (
        "and its pods are not all scheduled",
        growing(pod(ready=True), pod(name="b", scheduled=NO_GPU)),
        PODS_SCHEDULED,
        "False",
        "Unschedulable",
        NO_GPU,
    ),
    (
        "a replica of the spec that waits for a node",
        observed(pod(ready=True), pod(name="b", scheduled=NO_GPU), owner=stored(replicas=2)),
        READY,
        "False",
        "Unschedulable",
        NO_GPU,
    ),
    (
        "a volume that cannot be mounted",
        situation(observed(pod()), failures={"chat-new-x": Failure("FailedMount", "no secret")}),
        PROGRESSING,
        "False",
        "FailedMount",
        "no secret",
    ),
    (
        "a download that is pending: no pods yet",
        Observed(resource=CACHED),
        PROGRESSING,
        "Unknown",
        "WaitingForModel",
        "the pods are created when the model is downloaded",
    ),
    (
        "a download pod without a volume",
        Observed(resource=CACHED, fetch_pods=(Pod(pod(scheduled=UNBOUND)),)),
        MODEL_CACHED,
        "False",
        "VolumeNotBound",
        "check spec.cache.storageClassName",
    ),
    (
        "a download pod without a node",
        Observed(resource=CACHED, fetch_pods=(Pod(pod(scheduled=NO_MEMORY)),)),
        MODEL_CACHED,
        "False",
        "Unschedulable",
        NO_MEMORY,
    ),
    (
        "an added replica that crashes",
        growing(pod(ready=True), pod(name="b", **container(restarts=1))),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "1 of 2",
    ),
    (
        "an added replica that has served before",
        growing(pod(ready=True), pod(name="b", **container(started=True))),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "1 of 2",
    ),
    (
        "fewer than minReplicas",
        growing(pod(), pod(name="b")),
        AVAILABLE,
        "False",
        "ReplicasNotReady",
        "0 of 2",
    ),
    ("nothing wanted", observed(owner=stored(replicas=0)), AVAILABLE, "True", "ScaledToZero", "no requests are served"),
    ("idle", exposed(), AVAILABLE, "True", "ScaledToZero", "the gateway holds the next request"),
    ("idle, so nothing to schedule", exposed(), PODS_SCHEDULED, "True", "ScaledToZero", "0 replicas"),
    ("idle by the load", exposed(), SCALING_ACTIVE, "True", "Active", "starts when the gateway holds a request"),
    ("woken, and not ready", exposed(pod(), wanted=1), AVAILABLE, "False", "ReplicasNotReady", "0 of 1"),
    ("woken, and ready", exposed(pod(ready=True), wanted=1), AVAILABLE, "True", "AllReplicasReady", "1 of 1"),
    (
        "woken without a free GPU",
        exposed(pod(scheduled=NO_MEMORY), wanted=1),
        READY,
        "False",
        "Unschedulable",
        "Insufficient memory",
    ),
    ("alone with its name", exposed(holder=("space", "chat")), EXPOSED, "True", "ModelRouted", "for model chat"),
    (
        "younger than another of its name",
        exposed(holder=("other", "first")),
        EXPOSED,
        "False",
        "ModelNameTaken",
        "go to the older FastGenDeployment other/first: set another spec.model.servedName, or ask for model space/chat",
    ),
    ("without a gateway", exposed(has_gateway=False), EXPOSED, "False", "NoGateway", "until then, one replica runs"),
]


@pytest.mark.parametrize(
    ("seen", "kind", "status", "reason", "words"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_conditions_follow_the_observed_state(
    seen: Observed | Situation, kind: str, status: str, reason: str, words: str
) -> None:
    conditions = all_conditions(situation(seen) if isinstance(seen, Observed) else seen, None)
    condition = conditions[kind]
    assert (condition.status, condition.reason) == (status, reason)
    assert words in condition.message


@pytest.mark.parametrize(
    ("allocatable", "words"),
    [
        (None, ""),  # the operator may not read nodes
        ([0, None], "; a replica needs 2 nvidia.com/gpu, and no node has any"),
        ([1, 0], "; a replica needs 2 nvidia.com/gpu, and the node with the most has 1"),
        ([4, 8], "; a replica needs 2 nvidia.com/gpu, and the node with the most has 8, some of them in use"),
    ],
)
def test_a_missing_gpu_is_compared_with_what_the_nodes_have(allocatable: list[int | None] | None, words: str) -> None:
    nodes = [
        {"status": {"allocatable": {} if number is None else {"nvidia.com/gpu": str(number)}}}
        for number in allocatable or ()
    ]
    seen = situation(observed(pod(scheduled=NO_GPU), owner=GPU))
    assert pods_short_of_gpus(seen)
    condition = all_conditions(replace(seen, nodes=tuple(nodes)), None)[PODS_SCHEDULED]
    assert condition.message == f"1 of 1 pods cannot be scheduled; pod chat-new-x: {NO_GPU}{words}"
    assert not pods_short_of_gpus(situation(observed(pod(scheduled=NO_MEMORY), owner=GPU)))
    best = all_conditions(replace(seen, nodes=tuple(nodes), best_node=NodeGPUs(1, 8)), None)[PODS_SCHEDULED]
    assert best.message.endswith("; a replica needs 2 nvidia.com/gpu, and the node with the most free has 1 of its 8")


def test_conditions_are_unknown_until_the_deployment_controller_observes_the_latest_spec() -> None:
    seen = observed(pod(ready=True), owner=stored(autoscaling={"maxReplicas": 2}), **DONE)
    assert seen.deployment is not None
    status = {**seen.deployment.obj["status"], "observedGeneration": 6}
    seen = seen.with_child(DEPLOYMENT, {**seen.deployment.obj, "status": status})
    conditions = all_conditions(situation(seen), None)
    # ModelCached does not depend on the Deployment. Four are absent without podTemplate, foreign fields, gateway and
    # placeholder pods.
    expected = dict.fromkeys((READY, *ORDER), "Unknown") | {MODEL_CACHED: "True"}
    del expected[PODS_RESTRICTED], expected[TEMPLATE_UNMODIFIED], expected[EXPOSED], expected[HEADROOM_RESERVED]
    assert {kind: condition.status for kind, condition in conditions.items()} == expected


def test_minreplicas_0_counts_as_1_without_a_gateway() -> None:
    """A spec that no gateway serves would otherwise never get a replica."""
    fresh = Observed(stored(autoscaling={"minReplicas": 0, "maxReplicas": 4}, gateway={"expose": True}))
    assert situation(fresh, has_gateway=True).desired_replicas == 0, "a new resource waits for its first request"
    assert situation(fresh).desired_replicas == 1
    assert exposed(wanted=0, has_gateway=False).desired_replicas == 1
    assert subject_of(exposed(), 5.0).scales_to_zero
    assert not subject_of(exposed(has_gateway=False), 5.0).scales_to_zero


def paused(seen: Observed) -> Observed:
    assert seen.deployment is not None
    deployment = seen.deployment.obj
    return seen.with_child(DEPLOYMENT, {**deployment, "spec": {**deployment["spec"], "paused": True}})


def test_old_pods_of_a_paused_deployment_do_not_count_as_current() -> None:
    seen = paused(observed(pod("old", ready=True)))
    seen = replace(seen, replica_sets=seen.replica_sets[:1])  # the controller creates no ReplicaSet while paused
    conditions = all_conditions(situation(seen), None)
    assert conditions[AVAILABLE].status == "False"
    assert (conditions[READY].status, conditions[PODS_SCHEDULED].status) == ("False", "Unknown")
    assert conditions[PROGRESSING].reason == "DeploymentPaused"
    assert "kubectl rollout resume deployment/chat" in conditions[PROGRESSING].message


def test_a_deployment_paused_after_its_rollout_is_ready() -> None:
    seen = paused(observed(pod(ready=True)))
    ready = all_conditions(situation(seen), None)[READY]
    assert (ready.status, ready.reason) == ("True", "AllReplicasReady")


def test_conditions_do_not_depend_on_the_order_of_the_pods() -> None:
    pods = [pod(name=n, **container(state=waiting("ErrImagePull", n))) for n in "abc"]
    first, *others = (all_conditions(situation(observed(*order)), None) for order in permutations(pods))
    assert all(other == first for other in others)


def test_ready_is_the_first_false_before_any_unknown() -> None:
    ready = all_conditions(situation(observed(owner=GPU)), Problem("ApplyRefused", "quota"))[READY]
    assert (ready.status, ready.reason, ready.message) == ("False", "ApplyRefused", "quota")
    ready = all_conditions(situation(observed(pod(scheduled=NO_GPU), owner=GPU, **LATE)), None)[READY]
    assert ready.reason == "InsufficientGPU"


def test_an_invalid_spec_is_reported_in_every_condition() -> None:
    conditions = unread_conditions(Problem("InvalidSpec", "spec.engine: unknown"))
    assert [(kind, c.status, c.reason) for kind, c in conditions.items()] == [
        ("Ready", "False", "InvalidSpec"),
        ("ModelCached", "Unknown", "NotObserved"),
        ("PodsScheduled", "Unknown", "NotObserved"),
        ("Progressing", "False", "InvalidSpec"),
        ("Available", "Unknown", "NotObserved"),
        ("ScalingActive", "Unknown", "NotObserved"),
        ("ScalingLimited", "Unknown", "NotObserved"),
        ("ReplicasUniform", "Unknown", "NotObserved"),
    ]


def test_the_transition_time_changes_with_the_status_only() -> None:
    seen = observed(pod())
    first = merge_conditions(all_conditions(situation(seen), None), [], 1, "T1")
    assert {c["lastTransitionTime"] for c in first} == {"T1"}
    seen = observed(pod(ready=True), **DONE)
    second = {c["type"]: c for c in merge_conditions(all_conditions(situation(seen), None), first, 2, "T2")}
    assert {kind: c["lastTransitionTime"] for kind, c in second.items()} == {
        "Ready": "T2",
        "ModelCached": "T1",
        "PodsScheduled": "T1",
        "Progressing": "T1",  # its reason changed, its status did not
        "Available": "T2",
        "ScalingActive": "T1",
        "ScalingLimited": "T1",
        "ReplicasUniform": "T1",
    }
    assert {c["observedGeneration"] for c in second.values()} == {2}


EVICTED_LATELY = pod(name="e", **EVICTED)
EVICTED_LATELY["metadata"]["creationTimestamp"] = "2026-01-03T00:00:00Z"


def ready_since(time: str) -> Object:
    found = pod(ready=True)
    found["status"]["conditions"][0]["lastTransitionTime"] = time
    return found


@pytest.mark.parametrize(
    ("ready_at", "reason"), [("2026-01-02T00:00:00Z", "PodsFailed"), ("2026-01-04T00:00:00Z", "RollingOut")]
)
def test_pods_that_were_evicted_before_others_became_ready_do_not_matter_any_more(ready_at: str, reason: str) -> None:
    ended = [{**EVICTED_LATELY, "metadata": {**EVICTED_LATELY["metadata"], "name": f"chat-new-{n}"}} for n in range(3)]
    seen = observed(*ended, ready_since(ready_at), pod(), owner=stored(replicas=2))
    assert all_conditions(situation(seen), None)[PROGRESSING].reason == reason


@pytest.mark.parametrize("status", [REFUSED, LATE])
def test_growth_that_fails_does_not_make_a_fleet_unready_that_serves_what_was_promised(status: Object) -> None:
    seen = growing(pod(ready=True))
    assert seen.observed.deployment is not None
    live = seen.observed.deployment.obj
    failing = seen.observed.with_child(DEPLOYMENT, {**live, "status": {**live["status"], **status}})
    conditions = all_conditions(replace(seen, observed=failing), None)
    assert conditions[PROGRESSING].status == "False", "it is still shown"
    assert conditions[READY].status == "True"
    fixed = situation(replace(failing, resource=stored(replicas=2)))
    assert all_conditions(fixed, None)[READY].status == "False"


def test_long_messages_are_truncated_and_keep_the_field_and_the_remedy() -> None:
    words = f"spec.scheduling.nodeSelector: Invalid value: {'x' * 5000}: correct or remove the field"
    merged = merge_conditions(unread_conditions(Problem("ApplyRefused", words)), [], 1, "T1")
    (message,) = {each["message"] for each in merged if each["reason"] == "ApplyRefused"}
    assert len(message) == 1000
    assert message.startswith("spec.scheduling.nodeSelector: ")
    assert message.endswith(": correct or remove the field")
