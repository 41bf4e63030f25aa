"""Objects as the API server returns them, for tests of pure functions."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.children.platform import PodSettings
from fastgen_operator.children.pod import build_pod_spec
from fastgen_operator.kinds import DEPLOYMENT, FIELD_MANAGER, Object
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation
from fastgen_operator.pods import Pod
from harness.space import resource

UID = "uid-of-chat"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ANY_TEMPLATE = PodSettings(pod_template="any")


def stored(name: str = "chat", *, generation: int = 1, **spec: Any) -> Object:
    """Return a FastGenDeployment with the metadata that the API server adds."""
    obj = resource(name, **spec)
    metadata = {"name": name, "namespace": "space", "uid": UID, "generation": generation, "resourceVersion": "1"}
    return {**obj, "metadata": metadata}


def spec_of(obj: Object) -> Spec:
    return Spec.model_validate(obj["spec"])


def deployment(owner: Object, *, revision: int = 1, observed: bool = True, **status: Any) -> Object:
    """Return the Deployment of the resource; keywords set its status."""
    spec = spec_of(owner)
    replicas = situation(Observed(owner)).desired_replicas
    built = build_deployment(owner, spec, "engine:test", replicas, ANY_TEMPLATE)
    metadata = {
        **built["metadata"],
        "uid": "uid-of-deployment",
        "generation": 7,
        "resourceVersion": "1",
        "annotations": {"deployment.kubernetes.io/revision": str(revision)},
    }
    return {**built, "metadata": metadata, "status": {"observedGeneration": 7 if observed else 6, **status}}


def replica_set(hash_: str, template: Object) -> Object:
    """Return a ReplicaSet as the Deployment controller creates it: the template with the hash label."""
    owner = {"uid": "uid-of-deployment", "controller": True}
    labels = {**template["metadata"]["labels"], "pod-template-hash": hash_}
    metadata = {"name": f"chat-{hash_}", "labels": labels, "ownerReferences": [owner]}
    return {
        "metadata": metadata,
        "spec": {"template": {**template, "metadata": {**template["metadata"], "labels": labels}}},
    }


def pod(
    template: str = "new", *, name: str = "x", scheduled: str = "True", ready: bool = False, **status: Any
) -> Object:
    """Return a pod of the resource; `scheduled` is "True", "" for not yet, or the scheduler's message."""
    conditions = [{"type": "Ready", "status": str(ready)}]
    if scheduled == "True":
        conditions.append({"type": "PodScheduled", "status": "True"})
    elif scheduled:
        conditions.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduled})
    labels = {"pod-template-hash": template}
    metadata = {"name": f"chat-{template}-{name}", "uid": f"uid-of-{name}", "resourceVersion": "1", "labels": labels}
    spec = build_pod_spec("chat", spec_of(stored(resources={"limits": {"memory": "2Gi"}})), "engine:test")
    node = {"nodeName": "n1"} if scheduled == "True" else {}
    return {"metadata": metadata, "spec": {**spec, **node}, "status": {"conditions": conditions, **status}}


def leaving(pod: Object, until: str = "2026-01-01T00:01:30Z") -> Object:
    """Return the pod as terminating until `until`."""
    return {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": until}}


def container(*, restarts: int = 0, ready: bool = False, started: bool = False, **states: Any) -> Object:
    """Return a pod status with the engine container's status; keywords are `state` and `lastState`."""
    status = {"name": "engine", "image": "e", "ready": ready, "started": started, "restartCount": restarts, **states}
    return {"containerStatuses": [status]}


def observed(*pods: Object, owner: Object | None = None, **deployment_status: Any) -> Observed:
    """Return an observed resource with these pods, the current template `new` and the older template `old`."""
    owner = owner or stored()
    count = len(pods)
    status = {"replicas": count, "updatedReplicas": count, **deployment_status}
    built = deployment(owner, revision=2, **status)
    template = built["spec"]["template"]
    older = {**template, "spec": {**template["spec"], "terminationGracePeriodSeconds": 1}}
    return Observed(
        resource=owner,
        children={(DEPLOYMENT, owner["metadata"]["name"]): built},
        replica_sets=(replica_set("old", older), replica_set("new", template)),
        pods=tuple(map(Pod, pods)),
    )


def situation(seen: Observed, now: datetime = NOW, **known: Any) -> Situation:
    """Return the situation of what was observed; keywords are what else is known."""
    return Situation(seen, spec_of(seen.resource), now, **known)


def applied(manifest: Object, **metadata: Any) -> Object:
    """Return the manifest as server-side apply stores it; keywords are further metadata."""
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": _fields(manifest)}
    return {**manifest, "metadata": {**manifest["metadata"], "managedFields": [entry], **metadata}}


def lose(obj: Object, *path: str) -> Object:
    """Return the object after another manager took over the field at `path` of the operator's entry."""
    changed = copy.deepcopy(obj)
    owned = changed["metadata"]["managedFields"][0]["fieldsV1"]
    for name in path[:-1]:
        owned = owned[name]
    del owned[path[-1]]
    return changed


def _fields(value: Any) -> Object:
    """Return the field set of a value: lists of named items are merged by name, others are owned as a whole."""
    if isinstance(value, dict):
        return {f"f:{name}": _fields(field) for name, field in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {f"k:{json.dumps({'name': item['name']})}": {".": {}, **_fields(item)} for item in value}
    return {}
