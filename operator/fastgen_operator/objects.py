"""Facts read from any object: fingerprint, pod template, field ownership. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from fastgen_operator.kinds import FIELD_MANAGER, Object

TEMPLATE_LABEL: Final = "pod-template-hash"
TEMPLATE_DIGEST: Final = "templateDigest"


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def template_digest(workload: Object) -> str:
    """Return a hash of a workload's pod template: equal for a Deployment and the ReplicaSet of its newest template.

    The cache stores this digest in place of a ReplicaSet's template.
    """
    spec = workload["spec"]
    if TEMPLATE_DIGEST in spec:
        return str(spec[TEMPLATE_DIGEST])
    metadata = {name: value for name, value in spec["template"].get("metadata", {}).items() if value is not None}
    # The Deployment controller adds this label to the ReplicaSet's template only.
    labels = {name: value for name, value in metadata.get("labels", {}).items() if name != TEMPLATE_LABEL}
    return fingerprint({**spec["template"], "metadata": {**metadata, "labels": labels}})


def applied_entry(obj: Object) -> dict[str, Any] | None:
    """Return the entry of `metadata.managedFields` that server-side apply keeps for this operator, or None."""
    for entry in obj["metadata"].get("managedFields") or ():
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply":
            return dict(entry)
    return None
