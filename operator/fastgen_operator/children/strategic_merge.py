"""Strategic merge patch for pod specs, as in `kubectl patch --type strategic`. Pure.

Maps are merged; scalars and lists are replaced. Lists in `MERGE_KEYS` are merged instead: an item is merged with the
existing item of the same key, or appended. Supported directives:

- null removes a field; `$patch: delete` removes the map or list item that contains it.
- `$patch: replace` in a map, or as a separate item of a list, discards the existing content.
- `$retainKeys: [...]` in a map discards the existing fields that it does not name.

Source: kubernetes.io, "Update API objects in place using kubectl patch", and the patchStrategy and patchMergeKey tags
of k8s.io/api/core/v1, PodSpec and Container.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

from fastgen_operator.kinds import Object

MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "resourceClaims": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
# Items that hold exactly one of several sources (upstream's strategy retainKeys): a new source replaces the old one.
_ONE_OF: Final = ("volumes", "resourceClaims")
_DIRECTIVES: Final = ("$patch", "$retainKeys")


class MergeError(ValueError):
    """A patch cannot be merged; the message is one line that names the field and what it must be."""


def strategic_merge(base: Object, patch: Object, path: str) -> Object:
    """Return `base` with `patch` merged over it; neither is modified.

    Merging is idempotent, except for the order of items that the patch both deletes and adds.

    Args:
        path: path of the patch within the resource, for error messages.

    Raises:
        MergeError: the patch contains an unknown or misplaced directive, a list item without its merge key, or a value
            of the wrong type.
    """
    _check_directives(patch, path)
    action = patch.get("$patch")
    kept = {} if action == "replace" else dict(base)
    if "$retainKeys" in patch:
        kept = {name: value for name, value in kept.items() if name in patch["$retainKeys"]}
    for name, value in patch.items():
        if name in _DIRECTIVES:
            continue
        if value is None or _is_deletion(value):
            kept.pop(name, None)
        else:
            kept[name] = _merged_value(name, kept.get(name), value, f"{path}.{name}")
    return kept


def _merged_value(name: str, base: Any, patch: Any, path: str) -> Any:
    if name in MERGE_KEYS:
        if not isinstance(patch, list):
            raise MergeError(f"{path}: must be a list")
        return _merged_list(name, base or [], patch, path)
    if isinstance(base, dict) and not isinstance(patch, dict):
        raise MergeError(f"{path}: must be a map")
    if isinstance(patch, dict):
        return strategic_merge(base if isinstance(base, dict) else {}, patch, path)
    if isinstance(patch, list):
        return [
            strategic_merge({}, item, f"{path}[{index}]") if isinstance(item, dict) else item
            for index, item in enumerate(patch)
        ]
    return patch


def _merged_list(name: str, base: list[Any], patch: list[Any], path: str) -> list[Any]:
    key = MERGE_KEYS[name]
    for index, item in enumerate(patch):
        if item != {"$patch": "replace"} and not (isinstance(item, dict) and key in item):
            raise MergeError(f"{path}[{index}]: each item needs its merge key {key}: add it")
        if item.get("$patch") == "replace" and key in item:
            raise MergeError(
                f"{path}[{index}]: $patch: replace replaces the whole list, and must be an item of its own: to replace "
                f"this item alone, put an item with the same {key} and $patch: delete beside it"
            )
    # Apply deletions first, regardless of their position, so that a patch can replace an item.
    deleted = {_hashable(item[key]) for item in patch if _is_deletion(item)}
    kept = [item for item in base if _hashable(item.get(key)) not in deleted]
    merged: list[Any] = [] if {"$patch": "replace"} in patch else kept
    # The first item of each key; lists may have a thousand.
    places = {_hashable(item.get(key)): index for index, item in reversed(list(enumerate(merged)))}
    for item in patch:
        if key not in item or _is_deletion(item):
            continue
        index = places.setdefault(_hashable(item[key]), len(merged))
        before = merged[index] if index < len(merged) else {}
        sources = [field for field in item if field != key and not field.startswith("$")]
        if name in _ONE_OF and sources and not any(source in before for source in sources):
            before = {}
        merged[index : index + 1] = [strategic_merge(before, item, f"{path}[{item[key]}]")]
    return merged


def _hashable(value: Any) -> Any:
    """Return a value of a merge key, or its text if it is a list or a map, which the API server will reject."""
    return value if isinstance(value, Hashable) else repr(value)


def _is_deletion(value: Any) -> bool:
    return isinstance(value, dict) and value.get("$patch") == "delete"


def _check_directives(patch: Object, path: str) -> None:
    for name in patch:
        if name.startswith("$") and name not in _DIRECTIVES:
            raise MergeError(f"{path}.{name}: unknown directive: use one of {', '.join(_DIRECTIVES)}")
    if patch.get("$patch", "merge") not in ("replace", "delete", "merge"):
        raise MergeError(f"{path}.$patch: must be replace, delete or merge")
    if not isinstance(patch.get("$retainKeys", []), list):
        raise MergeError(f"{path}.$retainKeys: must be a list of the fields to keep")
