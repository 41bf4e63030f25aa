"""Adverse conditions for tests: a node without a kubelet, unreachable webhooks, crashes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import POD, Kind
from harness.probes import LIMIT_RANGE, probe
from harness.space import NOW, Space
from support.namespace import Object
from support.waiting import eventually

NODE = Kind("", "v1", "Node", "nodes")
NO_GPU: str = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


@contextlib.contextmanager
def node(plane: ControlPlane, name: str) -> Iterator[None]:
    """A node that is Ready but has no kubelet. Tests set the status of its pods; only `bury` ends deleted ones."""
    has = {"cpu": "8", "memory": "32Gi", "pods": "20", "nvidia.com/gpu": "1"}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now, "lastTransitionTime": now}
    made = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {"capacity": has, "allocatable": has, "conditions": [ready]},
    }
    plane.kubectl("create", "--filename", "-", stdin=json.dumps(made))
    try:
        yield
    finally:
        plane.kubectl("delete", "node", name, "--ignore-not-found")


def schedule(space: Space, name: str) -> None:
    """Act as a scheduler with one GPU on the node: bind a pod as soon as the GPU is free."""
    pods = space.items("pods")
    taken = any(pod["spec"].get("nodeName") for pod in pods)
    for pod in pods:
        if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
            continue
        if taken:
            space.set_unschedulable(pod, NO_GPU)
            continue
        taken = True
        bind(space, pod, name)


def bind(space: Space, pod: Object, name: str) -> None:
    """Assign the pod to the node, as a scheduler does."""
    target = {"apiVersion": "v1", "kind": "Node", "name": name}
    body = {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
    path = POD.path(space.name, pod["metadata"]["name"], "binding")
    space.server.request("POST", path, body=body, content_type="application/json")


def silence(space: Space, name: str) -> None:
    """Let the node lose its connection: the node controller taints it, and its pods are evicted without ever ending."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": now}
    body = {"status": {"conditions": [unknown]}}
    strategic = "application/strategic-merge-patch+json"
    space.server.request("PATCH", NODE.path(None, name, "status"), body=body, content_type=strategic)


def bury(space: Space) -> None:
    """Remove terminating pods, as the kubelet would."""
    for pod in space.items("pods"):
        if pod["metadata"].get("deletionTimestamp"):
            space.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0", "--wait=false")


def record(space: Space, pod: Object, reason: str, message: str, *, count: int = 2, time: str = NOW) -> None:
    """Record an Event about the pod, as the kubelet would."""
    metadata = pod["metadata"]
    kind = "Normal" if reason == "Pulling" else "Warning"
    event = {
        **{"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "pod-"}, "type": kind, "reason": reason},
        **{"message": message, "count": count, "firstTimestamp": NOW, "lastTimestamp": time},
        "involvedObject": {
            **{"apiVersion": "v1", "kind": "Pod", "namespace": space.name},
            **{"name": metadata["name"], "uid": metadata["uid"]},
        },
    }
    space.kubectl("create", "--filename", "-", stdin=json.dumps(event))


def crashed(restarts: int, words: str, *, code: int = 1, finished: str = NOW) -> Object:
    """Return the status of an engine container in CrashLoopBackOff after `restarts` restarts."""
    ended = {"exitCode": code, "reason": "Error", "message": words, "startedAt": NOW, "finishedAt": finished}
    return {
        "restartCount": restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": ended},
        "started": False,
    }


def pods_made(space: Space) -> int:
    """Return the number of pods created in the namespace so far."""
    events = space.items("events", fields="reason=SuccessfulCreate,involvedObject.kind=ReplicaSet")
    return sum(event.get("count") or 1 for event in events)


def quota(space: Space, kind: Kind, hard: str) -> None:
    """Create the ResourceQuota `none`, and wait until it rejects an object of the kind that is none of the operator's.

    Args:
        hard: its limits, as `kubectl create quota` takes them.
    """
    space.kubectl("create", "quota", "none", f"--hard={hard}")
    eventually(lambda: "quota: none" in probe(space, kind), within=20, what="the quota")


@contextlib.contextmanager
def dead_webhook(space: Space, group: str, resource: str) -> Iterator[None]:
    """Register an unreachable, required admission webhook for a kind in this namespace, and for LimitRanges there."""
    hook = {
        "name": "dead.fastgen.test",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [
            {"apiGroups": [of], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [plural]}
            for of, plural in ((group, resource), (LIMIT_RANGE.group, LIMIT_RANGE.plural))
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": space.name},
        "webhooks": [hook],
    }
    space.cluster.kubectl("create", "--filename", "-", stdin=json.dumps(configuration))
    try:
        eventually(lambda: "failed calling webhook" in probe(space, LIMIT_RANGE), within=20, what="the webhook")
        yield
    finally:
        space.cluster.kubectl("delete", "validatingwebhookconfiguration", space.name)
