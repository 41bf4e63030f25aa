"""Drift: the applied fields that the operator no longer owns, because another writer changed them. Pure.

The API server records in `metadata.managedFields` which fields each manager set. It takes a field from the operator's
entry as soon as another manager gives it another value or removes it, and knows defaults, units and merge keys
itself. Format: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/object-meta/ (FieldsV1).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from fastgen_operator.kinds import Object
from fastgen_operator.objects import applied_entry


def first_lost_field(manifest: Object, live: Object) -> str | None:
    """Return the path of the first applied field that the operator no longer owns, or None.

    It is metadata.managedFields if the operator has no entry there.
    """
    entry = applied_entry(live)
    if entry is None:
        return "metadata.managedFields"
    # The object's identity has no owner.
    wanted = {**manifest, "metadata": {**manifest["metadata"]}}
    del wanted["apiVersion"], wanted["kind"], wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    return _lost(wanted, entry["fieldsV1"], live, "")


def field_name(path: Iterable[str]) -> str:
    """Return the name of a field in a message, for example spec.containers[engine].env[DEBUG]."""
    name = ""
    for part in path:
        keys = list_keys(part)
        if keys is not None:
            name += f"[{next(iter(keys.values()))}]"
        elif part.startswith("f:"):
            name += f".{part[2:]}" if name else part[2:]
        else:
            name += f"[{part[2:]}]"
    return name


def list_keys(part: str) -> dict[str, Any] | None:
    """Return the keys of a list item in a field set, such as `k:{"name":"engine"}`; None for another part of a path."""
    keys = _parsed(part) if part.startswith("k:") else None
    return keys if isinstance(keys, dict) else None


def _lost(wanted: Any, owned: Mapping[str, Any], live: Any, path: str) -> str | None:
    """Return the path of the first field of `wanted` that is not in the set `owned`; an empty set owns the value."""
    if owned and isinstance(wanted, dict):
        return _lost_from_map(wanted, owned, live, path)
    if owned and isinstance(wanted, list):
        return _lost_from_list(wanted, owned, path)
    return None


def _lost_from_map(wanted: dict[str, Any], owned: Mapping[str, Any], live: Any, path: str) -> str | None:
    for name, value in wanted.items():
        here = f"{path}.{name}" if path else name
        current = live.get(name) if isinstance(live, dict) else None
        fields = owned.get(f"f:{name}")
        if fields is None:
            # A list that is merged item by item has no owner while it is empty.
            if value == [] and not current:
                continue
            return here
        if (lost := _lost(value, fields, current, here)) is not None:
            return lost
    return None


def _lost_from_list(wanted: list[Any], owned: Mapping[str, Any], path: str) -> str | None:
    names = _by_value(owned)
    for index, item in enumerate(wanted):
        labels = ((_label(name, item), name) for name in _candidates(item, names))
        label, name = next((pair for pair in labels if pair[0] is not None), (str(index), None))
        here = f"{path}[{label}]"
        if name is None:
            return here
        if (lost := _lost(item, owned[name], None, here)) is not None:
            return lost
    return None


def _by_value(owned: Mapping[str, Any]) -> dict[tuple[str, Any], list[str]]:
    """Return the entries of a list's field set by each of their keys and values; a list may have a thousand items."""
    names: dict[tuple[str, Any], list[str]] = {}
    for name in owned:
        keys = _parsed(name)
        for pair in keys.items() if isinstance(keys, dict) else [("", keys)]:
            names.setdefault(pair, []).append(name)
    return names


def _candidates(item: Any, names: Mapping[tuple[str, Any], list[str]]) -> Iterator[str]:
    """Yield the entries that have a key and its value in common with the item, those with the rarest value first."""
    pairs = item.items() if isinstance(item, dict) else [("", item)]
    shared = [names[pair] for pair in pairs if isinstance(pair[1], Hashable) and pair in names]
    shared.sort(key=len)
    return chain.from_iterable(shared)


def _label(name: str, item: Any) -> str | None:
    """Return the list item's name in a message if `name` is its entry in a field set, else None.

    The entry of an item in an associative list has its keys, `k:{"containerPort":8000,"protocol":"TCP"}`; the manifest
    may omit keys that have a default. The entry of an item in a set has its value, `v:"x"`.
    """
    keys = _parsed(name)
    if not isinstance(keys, dict):
        return str(keys) if name.startswith("v:") and keys == item else None
    if not isinstance(item, dict) or any(item.get(key, value) != value for key, value in keys.items()):
        return None
    return str(next(value for key, value in keys.items() if key in item)) if keys.keys() & item.keys() else None


@lru_cache(maxsize=4096)
def _parsed(name: str) -> Any:
    return json.loads(name[2:]) if name[:2] in ("k:", "v:") else None
