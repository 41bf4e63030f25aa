"""Objects as the API server would give them, for tests of pure functions."""

from __future__ import annotations

from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.wanted import wanted_replicas
from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.kinds import DEPLOYMENT, Object
from fastgen_operator.world import World
from harness.space import resource

UID = "uid-of-chat"


def stored(name: str = "chat", *, generation: int = 1, **spec: Any) -> Object:
    """A FastGenDeployment with what the API server adds."""
    obj = resource(name, **spec)
    metadata = {"name": name, "namespace": "space", "uid": UID, "generation": generation, "resourceVersion": "1"}
    return {**obj, "metadata": metadata}


def spec_of(obj: Object) -> Spec:
    return Spec.model_validate(obj["spec"])


def deployment(owner: Object, *, revision: int = 1, observed: bool = True, **status: Any) -> Object:
    """The Deployment of the resource; keywords are its status."""
    spec = spec_of(owner)
    built = build_deployment(owner, spec, "engine:test", wanted_replicas(spec, World(owner)))
    metadata = {
        **built["metadata"],
        "uid": "uid-of-deployment",
        "generation": 7,
        "resourceVersion": "1",
        "annotations": {"deployment.kubernetes.io/revision": str(revision)},
    }
    return {**built, "metadata": metadata, "status": {"observedGeneration": 7 if observed else 6, **status}}


def replica_set(template: str, *, revision: int) -> Object:
    owner = {"uid": "uid-of-deployment", "controller": True}
    metadata = {
        "name": f"chat-{template}",
        "labels": {"pod-template-hash": template},
        "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        "ownerReferences": [owner],
    }
    return {"metadata": metadata}


def pod(template: str = "new", *, scheduled: str = "True", ready: bool = False, **status: Any) -> Object:
    """A pod; `scheduled` is "True", "" for not yet, or the scheduler's words."""
    conditions = [{"type": "Ready", "status": str(ready)}]
    if scheduled == "True":
        conditions.append({"type": "PodScheduled", "status": "True"})
    elif scheduled:
        conditions.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduled})
    metadata = {"name": f"chat-{template}-x", "labels": {"pod-template-hash": template}}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": conditions, **status}}


def container(*, restarts: int = 0, **states: Any) -> Object:
    """Status of a container that is not ready; keywords are `state` and `lastState`."""
    return {"containerStatuses": [{"name": "engine", "image": "e", "ready": False, "restartCount": restarts, **states}]}


def world(*pods: Object, owner: Object | None = None, **deployment_status: Any) -> World:
    """A resource whose newest template is `new` and whose older one is `old`, with those pods."""
    owner = owner or stored()
    count = len(pods)
    status = {"replicas": count, "updatedReplicas": count, **deployment_status}
    return World(
        resource=owner,
        children={(DEPLOYMENT, owner["metadata"]["name"]): deployment(owner, revision=2, **status)},
        replica_sets=(replica_set("old", revision=1), replica_set("new", revision=2)),
        pods=pods,
    )
