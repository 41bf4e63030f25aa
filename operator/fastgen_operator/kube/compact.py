"""Reduce objects to the fields that the operator reads, for the informer cache.

Their strings are interned. A pod from the API server is about 10 KB, most of it a copy of its Deployment's template.

Tenants write these objects, and the API server accepts 1.5 MB in 10,000 levels of nesting. An object beyond the limits
below is kept as a stub, with the fault as text: see docs/decisions/044.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from typing import Any, Final

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, GROUP, POD, REPLICA_SET, Kind, Object
from fastgen_operator.labels_and_annotations import OWNER_LABEL, TEMPLATE_LABEL
from fastgen_operator.objects.deployment import TEMPLATE_DIGEST, template_digest
from fastgen_operator.objects.managed_fields import applied_entry, foreign_entries
from fastgen_operator.objects.stored import FAULT

# Levels of nesting of an object; the object itself is the first. The chart's admission policy has the same limit.
LEVELS: Final = 32
# Characters of an object's JSON, after it was reduced. The chart's admission policy allows 128 Ki in a spec. What the
# API server adds to a Deployment of such a spec fits into 1 Mi.
_CHARACTERS: Final = {FASTGEN: 1 << 18, DEPLOYMENT: 1 << 20}
_CHARACTERS_OF_OTHERS: Final = 1 << 16
# Larger specs are cached as compressed text: decoded, a list of small maps takes thirty times the memory.
_PACKED_FROM: Final = 1 << 13
_PACKED: Final = "packed"

# managedFields are half of many objects. Only the operator's own entry is read, and of Deployments also those of other
# managers of the spec: see `plan/drift.py` and `plan/foreign_fields.py`.
_METADATA: Final = ("managedFields", "selfLink", "finalizers")
# No other annotations are read. Tenants may write 256 KiB of them.
_ANNOTATIONS: Final = (f"{GROUP}/", "controller.kubernetes.io/", "deployment.kubernetes.io/")
# Fields kept of a pod's spec and of its containers. The rest is in the Deployment's template.
_POD_SPEC: Final = ("nodeName", "containers", "initContainers", "schedulingGates", "terminationGracePeriodSeconds")
_CONTAINER: Final = ("name", "image", "resources", "ports", "restartPolicy", "startupProbe", "readinessProbe")
_REPLICA_SET_SPEC: Final = ("replicas",)
# Fields kept of the metadata of a stub.
_IDENTITY: Final = (
    *("name", "namespace", "uid", "resourceVersion", "generation"),
    *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
)
# Names of a path in a message.
_NAMED: Final = 4
# The name of the model of a FastGenDeployment that the gateway routes to, beside its spec, which may be packed.
EXPOSED_MODEL: Final = "exposedModel"
# Field sets consist largely of empty maps.
_EMPTY: Final[dict[str, Any]] = {}


class _TooDeepError(Exception):
    """The object has more than `LEVELS` levels."""


def compact(kind: Kind, obj: Object) -> Object:
    """Return a copy of the object with the fields that the operator reads of its kind.

    Of an object that is nested too deeply or too large, the copy is a stub with the reason under `FAULT`.
    """
    if FAULT in obj:
        return obj
    try:
        kept: Object = _intern(_reduced(kind, obj), LEVELS)
        text = json.dumps(kept, ensure_ascii=False)
    except (_TooDeepError, RecursionError):
        place = _path(_deep_place(obj))
        return stub(kind, obj, f"{place}: nested more than {LEVELS} levels deep: flatten or remove it")
    limit = _CHARACTERS.get(kind, _CHARACTERS_OF_OTHERS)
    if len(text) > limit:
        size = f"the object has {len(text) >> 10} KiB, above {limit >> 10} KiB"
        return stub(kind, obj, f"{_path(_large_place(kept))}: {size}: shorten it")
    return kept


def stub(kind: Kind, obj: Object, fault: str | None = None) -> Object:
    """Return the identity, owner and operator class of an object; with a fault, also a FastGenDeployment's status.

    Args:
        fault: why the rest cannot be used; None if this operator does not need it.
    """
    metadata = {name: obj["metadata"][name] for name in _IDENTITY if name in obj["metadata"]}
    labels = obj["metadata"].get("labels") or {}
    metadata["labels"] = {name: labels[name] for name in (OWNER_LABEL, TEMPLATE_LABEL) if name in labels}
    if controllers := _controllers(obj["metadata"]):
        metadata["ownerReferences"] = controllers
    kept: Object = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
    kept["spec"] = _spec_of(kind, obj)
    kept |= _exposed_model(kind, obj)
    if kind == FASTGEN and fault is not None:
        kept["status"] = _status_of(obj)
    return kept if fault is None else {**kept, FAULT: fault}


def pack(kind: Kind, kept: Object) -> Object:
    """Return a FastGenDeployment or Deployment with a large spec and its managedFields as compressed text.

    Other objects are returned unchanged. `unpack` restores the fields.
    """
    if kind not in _CHARACTERS or FAULT in kept or "spec" not in kept:
        return kept
    metadata, spec = kept["metadata"], kept["spec"]
    heavy = {"spec": spec, "managedFields": metadata.get("managedFields")}
    text = json.dumps(heavy, ensure_ascii=False).encode()
    if len(text) < _PACKED_FROM:
        return kept
    return {
        **kept,
        "metadata": {name: value for name, value in metadata.items() if name != "managedFields"},
        "spec": _only(spec, ("operatorClass", TEMPLATE_DIGEST)),
        _PACKED: zlib.compress(text, 1),
    }


def unpack(cached: Object) -> Object:
    """Return an object of the cache with its whole spec and managedFields."""
    if _PACKED not in cached:
        return cached
    heavy = json.loads(zlib.decompress(cached[_PACKED]))
    managed = {} if heavy["managedFields"] is None else {"managedFields": heavy["managedFields"]}
    rest = {name: value for name, value in cached.items() if name != _PACKED}
    return {**rest, "metadata": {**cached["metadata"], **managed}, "spec": heavy["spec"]}


def _reduced(kind: Kind, obj: Object) -> Object:
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _METADATA}
    if annotations := metadata.get("annotations"):
        metadata["annotations"] = {name: text for name, text in annotations.items() if name.startswith(_ANNOTATIONS)}
    entry = applied_entry(obj) if kind != FASTGEN else None
    entries = [*([] if entry is None else [entry]), *(foreign_entries(obj) if kind == DEPLOYMENT else ())]
    if entries:
        metadata["managedFields"] = entries
    kept: Object = {"apiVersion": kind.api_version, "kind": kind.name, **obj, "metadata": metadata}
    kept |= _exposed_model(kind, obj)
    spec = obj.get("spec")
    if kind == POD and spec:
        kept["spec"] = _only(spec, _POD_SPEC) | {
            part: [_only(container, _CONTAINER) for container in spec[part]]
            for part in ("containers", "initContainers")
            if part in spec
        }
        if images := [volume for volume in spec.get("volumes", ()) if "image" in volume]:
            kept["spec"]["volumes"] = images
    elif kind == DEPLOYMENT and spec:
        # Beside the template: it is compared several times in each reconcile.
        kept["spec"] = {**spec, TEMPLATE_DIGEST: template_digest(obj)}
    elif kind == REPLICA_SET and spec:
        # The template is only compared with the Deployment's.
        kept["spec"] = _only(spec, _REPLICA_SET_SPEC) | {TEMPLATE_DIGEST: template_digest(obj)}
    return kept


def _spec_of(kind: Kind, obj: Object) -> Object:
    """Return the spec of a stub: what must be there to read it."""
    if kind == FASTGEN:
        chosen = (obj.get("spec") or {}).get("operatorClass")
        return {"operatorClass": chosen} if isinstance(chosen, str) else {}
    if kind == POD:
        return {"containers": []}
    return {"replicas": 0, TEMPLATE_DIGEST: ""} if kind == REPLICA_SET else {}


def _exposed_model(kind: Kind, obj: Object) -> Object:
    """Return `EXPOSED_MODEL` as a field, for a FastGenDeployment that the gateway routes to."""
    spec = obj.get("spec") or {}
    if kind != FASTGEN or not (spec.get("gateway") or {}).get("expose"):
        return {}
    return {EXPOSED_MODEL: (spec.get("model") or {}).get("servedName") or obj["metadata"]["name"]}


def _status_of(obj: Object) -> Object:
    """Return the status of a FastGenDeployment; empty if it is nested too deeply or too large."""
    try:
        status: Object = _intern(obj.get("status") or {}, LEVELS)
    except (_TooDeepError, RecursionError):
        return {}
    return status if len(json.dumps(status)) <= _CHARACTERS_OF_OTHERS else {}


def _controllers(metadata: Object) -> list[Any]:
    return [reference for reference in metadata.get("ownerReferences") or () if reference.get("controller")]


def _only(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _intern(value: Any, levels: int) -> Any:
    """Return an equal value with interned strings, which a thousand pods have in common.

    Raises:
        _TooDeepError: it has more levels.
    """
    if isinstance(value, dict):
        if not levels:
            raise _TooDeepError
        return {sys.intern(name): _intern(field, levels - 1) for name, field in value.items()} if value else _EMPTY
    if isinstance(value, list):
        if not levels:
            raise _TooDeepError
        return [_intern(item, levels - 1) for item in value]
    return sys.intern(value) if type(value) is str else value


def _deep_place(obj: Object) -> tuple[str, ...]:
    """Return the path of a value that is nested too deeply, without recursion; empty if there is none."""
    found: list[tuple[Any, tuple[str, ...]]] = [(obj, ())]
    while found:
        value, path = found.pop()
        if len(path) >= LEVELS and isinstance(value, dict | list):
            return path
        found.extend((child, (*path, name)) for name, child in _children(value))
    return ()


def _large_place(obj: Object) -> tuple[str, ...]:
    """Return the path to the largest part, as deep as it makes up at least half of its parent."""
    path: tuple[str, ...] = ()
    value: Any = obj
    size: Callable[[Any], int] = lambda part: len(json.dumps(part, ensure_ascii=False))  # noqa: E731
    while children := list(_children(value)):
        name, largest = max(children, key=lambda pair: size(pair[1]))
        if 2 * size(largest) < size(value):
            break
        path, value = (*path, name), largest
    return path


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return [(str(index), item) for index, item in enumerate(value)] if isinstance(value, list) else []


def _path(names: tuple[str, ...]) -> str:
    shown = ".".join(name[:63] for name in names[:_NAMED]) or "the object"
    return f"{shown}.…" if len(names) > _NAMED else shown
