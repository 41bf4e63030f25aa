"""Foreign fields: fields of the Deployment's pod spec that other managers added. Pure.

Server-side apply removes only fields that the operator owned. A field that `kubectl edit`, `kubectl set env` or
`kubectl rollout undo` added belongs to that manager and stays. The operator removes a conflicting one by taking it
over: it moves the field to its own entry in `metadata.managedFields`, and the next apply, which does not contain the
field, removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION
from fastgen_operator.objects.container import ENGINE_CONTAINER
from fastgen_operator.objects.managed_fields import applied_entry, foreign_entries, is_applied_entry
from fastgen_operator.plan.drift import Path, field_name, list_keys

_POD: Final[Path] = ("f:spec", "f:template", "f:spec")
# Where a pod may run is decided by spec.scheduling.
_PLACEMENT: Final = frozenset(
    f"f:{name}"
    for name in (
        *("nodeSelector", "nodeName", "tolerations", "affinity", "topologySpreadConstraints"),
        *("schedulerName", "priorityClassName", "runtimeClassName"),
    )
)
# `kubectl rollout undo` restores this annotation together with an older template, which contradicts the whole spec.
_APPLIED: Final[Path] = ("f:metadata", "f:annotations", f"f:{APPLIED_ANNOTATION}")


@dataclass(frozen=True, slots=True)
class ForeignField:
    """A field of the pod spec that another manager added.

    `conflicts` tells whether it has to be removed: it changes where the pods run or what the engine does, or
    `kubectl rollout undo` restored it with an older template.
    """

    manager: str
    path: Path
    conflicts: bool

    @property
    def name(self) -> str:
        """The field as in a message, for example spec.template.spec.containers[engine].env[DEBUG]."""
        return field_name(self.path)


def foreign_fields(deployment: Object) -> tuple[ForeignField, ...]:
    """Return the fields of the pod spec that only other managers own, sorted by manager and path."""
    own = applied_entry(deployment)
    if own is None:
        return ()
    ours = set(_leaves(own["fieldsV1"]))
    known = {path[:length] for path in ours for length in range(len(path) + 1)}
    found = set()
    for entry in foreign_entries(deployment):
        theirs = set(_leaves(entry["fieldsV1"]))
        is_undo = _APPLIED in theirs - ours
        for path in theirs:
            steps = (path[:length] for length in range(1, len(path) + 1))
            first = next((step for step in steps if step not in known), ())
            # The owner of a leaf owns everything below it.
            if first[:3] == _POD and len(first) > 3 and first[-1] != "." and first[:-1] not in ours:
                found.add(ForeignField(str(entry["manager"]), first, is_undo or _decides(first)))
    return tuple(sorted(found, key=lambda field: (field.manager, field.path)))


def take_over(deployment: Object, fields: Iterable[ForeignField]) -> list[dict[str, Any]]:
    """Return the `managedFields` of a live, uncached Deployment with those fields moved to the operator's entry."""
    moved = [field.path for field in fields]
    entries = []
    for entry in deployment["metadata"]["managedFields"]:
        owned = list(_leaves(entry.get("fieldsV1", {})))
        if is_applied_entry(entry):
            owned += moved
        elif not entry.get("subresource"):
            owned = [path for path in owned if not any(path[: len(parent)] == parent for parent in moved)]
        if owned:
            entries.append({**entry, "fieldsV1": _tree(owned)})
    return entries


def _decides(path: Path) -> bool:
    """Return whether a field of the pod's spec decides where the pods run, or belongs to the engine's container."""
    first, *rest = path[len(_POD) :]
    is_engine = first == "f:containers" and rest and (list_keys(rest[0]) or {}).get("name") == ENGINE_CONTAINER
    return first in _PLACEMENT or bool(is_engine)


def _leaves(fields: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    """Yield the paths of a field set that have nothing below them."""
    for name, below in fields.items():
        if below:
            yield from _leaves(below, (*path, name))
        else:
            yield (*path, name)


def _tree(leaves: Iterable[Path]) -> dict[str, Any]:
    """Return the field set with these leaves."""
    root: dict[str, Any] = {}
    for path in leaves:
        node = root
        for name in path:
            node = node.setdefault(name, {})
    return root
