"""Reduce objects to the fields that the operator reads, for the informer cache.

Their strings are interned. A pod from the API server is about 10 KB, most of it a copy of its Deployment's template.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from fastgen_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, Kind, Object
from fastgen_operator.objects import TEMPLATE_DIGEST, applied_entry, foreign_entries, template_digest

# managedFields are half of many objects. Only the operator's own entry is read, and of Deployments also those of other
# managers of the spec: see `plan/drift.py` and `plan/foreign.py`.
_METADATA: Final = ("managedFields", "selfLink")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
# Fields kept of a pod's spec and of its containers. The rest is in the Deployment's template.
_POD_SPEC: Final = ("nodeName", "containers", "initContainers", "schedulingGates", "terminationGracePeriodSeconds")
_CONTAINER: Final = ("name", "image", "resources", "ports", "restartPolicy", "startupProbe", "readinessProbe")
_REPLICA_SET_SPEC: Final = ("replicas",)
# Field sets consist largely of empty maps.
_EMPTY: Final[dict[str, Any]] = {}


def compact(kind: Kind, obj: Object) -> Object:
    """Return a copy of the object with the fields that the operator reads of its kind."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _METADATA}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {name: value for name, value in annotations.items() if name != _LAST_APPLIED}
    entry = applied_entry(obj)
    entries = [*([] if entry is None else [entry]), *(foreign_entries(obj) if kind == DEPLOYMENT else ())]
    if entries:
        metadata["managedFields"] = entries
    kept: Object = {"apiVersion": kind.api_version, "kind": kind.name, **obj, "metadata": metadata}
    spec = obj.get("spec")
    if kind == POD and spec:
        kept["spec"] = _only(spec, _POD_SPEC) | {
            part: [_only(container, _CONTAINER) for container in spec[part]]
            for part in ("containers", "initContainers")
            if part in spec
        }
    elif kind == DEPLOYMENT and spec:
        # Beside the template: it is compared several times in each reconcile.
        kept["spec"] = {**spec, TEMPLATE_DIGEST: template_digest(obj)}
    elif kind == REPLICA_SET and spec:
        # The template is only compared with the Deployment's.
        kept["spec"] = _only(spec, _REPLICA_SET_SPEC) | {TEMPLATE_DIGEST: template_digest(obj)}
    shared: Object = _intern(kept)
    return shared


def _only(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _intern(value: Any) -> Any:
    """Return an equal value with interned strings, which a thousand pods have in common."""
    if isinstance(value, dict):
        return {sys.intern(name): _intern(field) for name, field in value.items()} if value else _EMPTY
    if isinstance(value, list):
        return [_intern(item) for item in value]
    return sys.intern(value) if type(value) is str else value
