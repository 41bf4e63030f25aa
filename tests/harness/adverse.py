"""Adverse conditions for tests: a node without a kubelet, unreachable webhooks, crashes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime

from cluster.controlplane import ControlPlane
from harness.space import NOW, Space
from support.namespace import Object

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
        plane.kubectl("delete", "node", name)


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
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        binding = {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
        path = f"/api/v1/namespaces/{space.name}/pods/{pod['metadata']['name']}/binding"
        space.cluster.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(binding))


def bury(space: Space) -> None:
    """Remove terminating pods, as the kubelet would."""
    for pod in space.items("pods"):
        if pod["metadata"].get("deletionTimestamp"):
            space.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0", "--wait=false")


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


@contextlib.contextmanager
def dead_webhook(space: Space, group: str, resource: str) -> Iterator[None]:
    """Register an unreachable, required admission webhook for a kind in this namespace only."""
    hook = {
        "name": "dead.fastgen.test",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [
            {"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}
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
        yield
    finally:
        space.cluster.kubectl("delete", "validatingwebhookconfiguration", space.name)
