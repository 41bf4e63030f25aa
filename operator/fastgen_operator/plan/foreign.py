"""Foreign fields: fields of the Deployment's pod template that other managers added. Pure.

Server-side apply removes only fields that the operator owned. A field that `kubectl edit`, `kubectl set env` or
`kubectl rollout undo` added belongs to that manager and stays. The operator removes it by taking it over: it moves the
field to its own entry in `metadata.managedFields`, and the next apply, which does not contain the field, removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.kinds import APPLIED_ANNOTATION, Object
from fastgen_operator.objects import applied_entry, foreign_entries, is_applied_entry
from fastgen_operator.plan.drift import field_name, list_keys
from fastgen_operator.pods import ENGINE_CONTAINER

# A path in FieldsV1, for example ("f:spec", "f:template", "f:spec", "f:nodeSelector").
Path = tuple[str, ...]

_POD: Final[Path] = ("f:spec", "f:template", "f:spec")
# Where a pod may run is decided by spec.scheduling.
_PLACEMENT: Final = frozenset(
    f"f:{name}"
    for name in (
        *("nodeSelector", "nodeName", "tolerations", "affinity", "topologySpreadConstraints"),
        *("schedulerName", "priorityClassName", "runtimeClassName"),
    )
)
# `kubectl rollout undo` puts this annotation back together with an older template, which contradicts the whole spec.
_APPLIED: Final[Path] = ("f:metadata", "f:annotations", f"f:{APPLIED_ANNOTATION}")


@dataclass(frozen=True, slots=True)
class ForeignField:
    """A field of the pod template that another manager added.

    `conflicts` tells whether it has to be removed: it changes where the pods run or what the engine does, or belongs to
    an older template.
    """

    manager: str
    path: Path
    conflicts: bool

    @property
    def name(self) -> str:
        """The field as in a message, for example spec.template.spec.containers[engine].env[DEBUG]."""
        return field_name(self.path)


def foreign_fields(deployment: Object) -> tuple[ForeignField, ...]:
    """Return the fields of the pod spec that only other managers own, by manager and field."""
    own = applied_entry(deployment)
    if own is None:
        return ()
    ours = _at(own["fieldsV1"], _POD)
    found = {
        ForeignField(str(entry["manager"]), path, _is_undo(entry["fieldsV1"], own["fieldsV1"]) or _decides(path))
        for entry in foreign_entries(deployment)
        for path in _beyond(_at(entry["fieldsV1"], _POD), ours, _POD)
    }
    return tuple(sorted(found, key=lambda field: (field.manager, field.path)))


def take_over(deployment: Object, fields: Iterable[ForeignField]) -> list[dict[str, Any]]:
    """Return the `managedFields` of a live, uncached Deployment with those fields moved to the operator's entry."""
    paths = [field.path for field in fields]
    taken: dict[str, Any] = {}
    others = []
    for entry in deployment["metadata"]["managedFields"]:
        owned = entry.get("fieldsV1", {})
        if not is_applied_entry(entry) and not entry.get("subresource"):
            for path in paths:
                taken = _union(taken, _only(owned, path))
                owned = _without(owned, path)
        others.append({**entry, "fieldsV1": owned})
    for entry in others:
        if is_applied_entry(entry):
            entry["fieldsV1"] = _union(entry["fieldsV1"], taken)
    return [entry for entry in others if entry["fieldsV1"]]


def _decides(path: Path) -> bool:
    """Return whether a field of the pod's spec decides where the pods run, or belongs to the engine's container."""
    first, *rest = path[len(_POD) :]
    is_engine = first == "f:containers" and rest and (list_keys(rest[0]) or {}).get("name") == ENGINE_CONTAINER
    return first in _PLACEMENT or bool(is_engine)


def _is_undo(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return whether `kubectl rollout undo` set the other manager's fields."""
    *place, name = _APPLIED
    return name in _at(theirs, place) and name not in _at(ours, place)


def _beyond(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """Yield the paths that are in the field set `theirs` but not in `ours`. An empty set owns the whole value."""
    for name, fields in theirs.items():
        if name == ".":
            continue
        if name not in ours:
            yield (*path, name)
        elif fields and ours[name]:
            yield from _beyond(fields, ours[name], (*path, name))


def _at(fields: Mapping[str, Any], path: Iterable[str]) -> Mapping[str, Any]:
    for name in path:
        fields = fields.get(name, {})
    return fields


def _only(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the subset at and below the path."""
    if not path:
        return dict(fields)
    return {path[0]: _only(fields[path[0]], path[1:])} if path[0] in fields else {}


def _union(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    return {**left, **{name: _union(left.get(name, {}), fields) for name, fields in right.items()}}


def _without(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the set without the field at the path, and without the sets that it leaves empty."""
    name, rest = path[0], path[1:]
    if name not in fields:
        return dict(fields)
    left = _without(fields[name], rest) if rest else {}
    others = {other: value for other, value in fields.items() if other != name}
    return {**others, name: left} if left else others
