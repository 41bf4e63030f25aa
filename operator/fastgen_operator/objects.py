"""Facts read from any object: name, owner, fingerprint, pod template, field ownership. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from fastgen_operator.kinds import APPLIED_ANNOTATION, FIELD_MANAGER, Object

TEMPLATE_LABEL: Final = "pod-template-hash"
TEMPLATE_DIGEST: Final = "templateDigest"
# Why an object of the cache is only a stub, as text: see `kube/compact.py`.
FAULT: Final = "fault"


def name_of(obj: Object) -> str:
    """Return the object's name."""
    return str(obj["metadata"]["name"])


def is_terminating(obj: Object) -> bool:
    """Return whether the object is being deleted. A pod may hold its node's GPUs until it is gone."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def is_controlled_by(child: Object, owner: Object) -> bool:
    """Return whether the child's controller is this owner, not an earlier one of the same name."""
    return any(
        reference.get("controller") and reference["uid"] == owner["metadata"]["uid"]
        for reference in child["metadata"].get("ownerReferences", ())
    )


def condition_of(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of that type in the status of any object; empty if there is none."""
    found: dict[str, Any] = next((each for each in status.get("conditions", ()) if each["type"] == kind), {})
    return found


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def template_digest(workload: Object) -> str:
    """Return a hash of a workload's pod template, equal for a Deployment and the ReplicaSet of its newest template.

    The cache stores this digest in place of a ReplicaSet's template.
    """
    spec = workload["spec"]
    if TEMPLATE_DIGEST in spec:
        return str(spec[TEMPLATE_DIGEST])
    metadata = {name: value for name, value in spec["template"].get("metadata", {}).items() if value is not None}
    # The Deployment controller adds this label to the ReplicaSet's template only.
    labels = {name: value for name, value in metadata.get("labels", {}).items() if name != TEMPLATE_LABEL}
    return fingerprint({**spec["template"], "metadata": {**metadata, "labels": labels}})


def live_template(workload: Object) -> Object:
    """Return the pod template of a live workload as it can be applied again."""
    template = workload["spec"]["template"]
    metadata = {name: value for name, value in template["metadata"].items() if name != "creationTimestamp"}
    return {"metadata": metadata, "spec": template["spec"]}


def version_of(obj: Object) -> int:
    """Return the object's resource version."""
    return int(obj["metadata"]["resourceVersion"])


def has_same_spec(before: Object, live: Object) -> bool:
    """Return whether only the status of the object may have changed, and what the operator wrote is still there."""

    def basis(obj: Object) -> tuple[str, int, str]:
        # API servers count generations from 1, and not for all kinds.
        return obj["metadata"]["uid"], obj["metadata"].get("generation", 0), applied_fingerprint(obj)

    return basis(before) == basis(live) and basis(live)[1] > 0


def annotations_of(obj: Object) -> dict[str, str]:
    """Return the annotations of an object or a pod template."""
    found: dict[str, str] = obj.get("metadata", {}).get("annotations") or {}
    return found


def applied_entry(obj: Object) -> dict[str, Any] | None:
    """Return this operator's entry of `metadata.managedFields`, which server-side apply keeps, or None."""
    return next((dict(entry) for entry in obj["metadata"].get("managedFields") or () if is_applied_entry(entry)), None)


def is_applied_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `metadata.managedFields` lists what this operator applied."""
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"


def foreign_entries(obj: Object) -> tuple[dict[str, Any], ...]:
    """Return the entries of `metadata.managedFields` of other managers that own a part of the spec."""
    return tuple(
        entry
        for entry in obj["metadata"].get("managedFields") or ()
        if entry.get("manager") != FIELD_MANAGER
        and not entry.get("subresource")
        and "f:spec" in entry.get("fieldsV1", {})
    )


def applied_fingerprint(obj: Object) -> str:
    """Return the annotation with the fingerprint of the manifest applied last; empty if there is none."""
    return str(annotations_of(obj).get(APPLIED_ANNOTATION, ""))


def foreign_managers(obj: Object) -> tuple[str, ...]:
    """Return the other managers that own a part of the spec."""
    return tuple(sorted({str(entry["manager"]) for entry in foreign_entries(obj)}))
