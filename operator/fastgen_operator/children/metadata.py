"""Names, labels and owner references shared by all children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastgen_operator.api import PodTemplate, Spec
from fastgen_operator.kinds import FASTGEN, FETCH_SUFFIX, OWNER_LABEL, QUEUE_LABEL, Kind, Object

HTTP_PORT: Final = 8000
# Source: kubernetes/autoscaler, cluster-autoscaler/FAQ.md.
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
_QUEUE_LABELS: Final = (QUEUE_LABEL, "kueue.x-k8s.io/priority-class")


def selector(name: str) -> dict[str, str]:
    """Return the labels that select the pods. They never change: a Deployment's selector is immutable."""
    return {OWNER_LABEL: name}


def fetch_labels(name: str) -> dict[str, str]:
    """Return the labels of the pods that download the model. They do not match `selector`."""
    return {**labels(name), "app.kubernetes.io/name": "fastgen-fetch", OWNER_LABEL: f"{name}{FETCH_SUFFIX}"}


def labels(name: str) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        "app.kubernetes.io/name": "fastgen-engine",
        "app.kubernetes.io/instance": name,
        MANAGED_BY: "fastgen-operator",
        **selector(name),
    }


def queue_labels(owner: Object, spec: Spec) -> dict[str, str]:
    """Return the labels from which Kueue takes queue and priority, of spec.podTemplate before those of the resource.

    Kueue reads them on Deployments, on Jobs, and on the pods of other owners.
    """
    given = {**owner["metadata"].get("labels", {}), **(spec.pod_template or PodTemplate()).metadata.labels}
    return {name: given[name] for name in _QUEUE_LABELS if name in given}


def owner_reference(owner: Object) -> dict[str, Any]:
    """Return the reference that makes a resource the controller of a child."""
    metadata = owner["metadata"]
    return {
        "apiVersion": FASTGEN.api_version,
        "kind": FASTGEN.name,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(kind: Kind, owner: Object, fields: dict[str, Any], **overrides: Any) -> Object:
    """Return a child of `kind` with the name of its owner, and garbage-collected with it.

    Args:
        fields: the fields next to its metadata, for example spec.
        overrides: fields of its metadata.
    """
    metadata = owner["metadata"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": labels(metadata["name"]),
            "ownerReferences": [owner_reference(owner)],
            **overrides,
        },
        **fields,
    }


def scratch_volume() -> dict[str, Any]:
    """Return the volume of /tmp, bounded so that a runaway process ends its pod and not the node."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}}


def disposable_volumes(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotation that lets the cluster autoscaler evict the pod in spite of its emptyDirs."""
    names = [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume]
    return {SAFE_TO_EVICT: ",".join(names)}


# Security context of every container, as the restricted Pod Security Standard requires.
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def resources(requests: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's field `resources`, with quantities as text; empty if there are none."""
    kinds = {"requests": requests, "limits": limits}
    given = {kind: {name: str(value) for name, value in values.items()} for kind, values in kinds.items()}
    return without_empty({"resources": without_empty(given)})


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the non-empty fields: the API server drops empty lists, maps, strings and nulls."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
