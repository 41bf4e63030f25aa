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
    """A node that says it is well and runs nothing: pods on it are what the test says, and end only by `bury`."""
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
    """What the scheduler would do with one GPU on the node: a pod gets it as soon as it is free."""
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
    """Ends the pods that are on their way out, as their kubelet would."""
    for pod in space.items("pods"):
        if pod["metadata"].get("deletionTimestamp"):
            space.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0", "--wait=false")


def crashed(restarts: int, words: str, *, code: int = 1, finished: str = NOW) -> Object:
    """The engine's container in the kubelet's back-off after so many restarts."""
    ended = {"exitCode": code, "reason": "Error", "message": words, "startedAt": NOW, "finishedAt": finished}
    return {
        "restartCount": restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": ended},
        "started": False,
    }


def pods_made(space: Space) -> int:
    """How many pods were ever created in the namespace."""
    events = space.items("events", "--field-selector", "reason=SuccessfulCreate,involvedObject.kind=ReplicaSet")
    return sum(event.get("count") or 1 for event in events)


@contextlib.contextmanager
def dead_webhook(space: Space, group: str, resource: str) -> Iterator[None]:
    """An admission webhook for that resource, in this namespace only, that is unreachable and required."""
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
