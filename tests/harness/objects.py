"""Objects as the API server returns them, for tests of pure functions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.children import Children, build_children
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.platform import Platform, PodSettings
from fastgen_operator.children.pod import build_pod
from fastgen_operator.children.template import build_template
from fastgen_operator.kinds import DEPLOYMENT, Kind, Object
from fastgen_operator.objects.managed_fields import FIELD_MANAGER
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import desired_state
from fastgen_operator.plan.situation import Situation
from harness.space import resource

UID = "uid-of-chat"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLATFORM = Platform("engine:test")
ANY_TEMPLATE = replace(PLATFORM, pods=PodSettings(pod_template="any"))


def stored(name: str = "chat", *, generation: int = 1, **spec: Any) -> Object:
    """Return a FastGenDeployment with the metadata that the API server adds."""
    obj = resource(name, **spec)
    metadata = {"name": name, "namespace": "space", "uid": UID, "generation": generation, "resourceVersion": "1"}
    return {**obj, "metadata": metadata}


def spec_of(obj: Object) -> Spec:
    return Spec.model_validate(obj["spec"])


def desired_of(owner: Object, platform: Platform = PLATFORM, **changes: Any) -> Desired:
    """Return what the resource's children are built from, before any of them exists."""
    return replace(desired_state(situation(Observed(owner)), platform), **changes)


def manifests(owner: Object, platform: Platform = PLATFORM, **changes: Any) -> Children:
    """Return the manifests of the resource's children; `changes` are those of what they are built from."""
    desired = desired_of(owner, platform, **changes)
    return build_children(desired, build_template(desired))


def manifest(kind: Kind, owner: Object, platform: Platform = PLATFORM, **changes: Any) -> Object:
    """Return the manifest of the only child of that kind."""
    (found,) = [each for of, each in manifests(owner, platform, **changes) if of == kind]
    return found


def pod_template(owner: Object, platform: Platform = PLATFORM) -> Object:
    """Return the pod template of the resource."""
    found: Object = manifest(DEPLOYMENT, owner, platform)["spec"]["template"]
    return found


def deployment(owner: Object, *, revision: int = 1, observed: bool = True, **status: Any) -> Object:
    """Return the Deployment of the resource; keywords set its status."""
    built = manifest(DEPLOYMENT, owner, ANY_TEMPLATE)
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
    spec = build_pod(desired_of(stored(resources={"limits": {"memory": "2Gi"}})))["spec"]
    node = {"nodeName": "n1"} if scheduled == "True" else {}
    return {"metadata": metadata, "spec": {**spec, **node}, "status": {"conditions": conditions, **status}}


def pod_with(name: str, **facts: Any) -> Pod:
    """Return a pod of which only these facts are known."""
    made = Pod({"metadata": {}})
    made.__dict__.update(name=name, **facts)
    return made


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
