"""Drift: the applied fields that the operator no longer owns, because another writer changed them. Pure.

The API server records in `metadata.managedFields` which fields each manager set. It takes a field from the operator's
entry as soon as another manager gives it another value or removes it, and knows defaults, units and merge keys
itself. Format: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/object-meta/ (FieldsV1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.objects.managed_fields import applied_entry

# A path in FieldsV1, for example ("f:spec", "f:containers", 'k:{"name":"engine"}', "f:args").
Path = tuple[str, ...]

# Keys of list items that a manifest may omit, with what the API server then sets.
_DEFAULT_KEYS: Final = {"protocol": "TCP", "name": ""}


def first_lost_field(manifest: Object, live: Object) -> str | None:
    """Return the name of the first applied field that the operator no longer owns, or None.

    It is metadata.managedFields if the operator has no entry there.
    """
    entry = applied_entry(live)
    if entry is None:
        return "metadata.managedFields"
    # The object's identity has no owner.
    wanted = {**manifest, "metadata": {**manifest["metadata"]}}
    del wanted["apiVersion"], wanted["kind"], wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    return next(map(field_name, _lost(wanted, entry["fieldsV1"], live, ())), None)


def field_name(path: Path) -> str:
    """Return the name of a field in a message, for example spec.containers[engine].env[DEBUG]."""
    name = ""
    for part in path:
        if part.startswith("f:"):
            name += f".{part[2:]}"
        else:
            item = json.loads(part[2:])
            name += f"[{next(iter(item.values()), '') if isinstance(item, dict) else item}]"
    return name.removeprefix(".")


def list_keys(part: str) -> dict[str, Any] | None:
    """Return the keys of a list item in a field set, such as `k:{"name":"engine"}`; None for another part of a path."""
    keys = json.loads(part[2:]) if part.startswith("k:") else None
    return keys if isinstance(keys, dict) else None


def _lost(wanted: Any, owned: Mapping[str, Any], live: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of the fields of `wanted` that are not in the set `owned`. An empty set owns the whole value."""
    if not owned:
        return
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            here, current = (*path, f"f:{name}"), live.get(name) if isinstance(live, dict) else None
            if here[-1] in owned:
                yield from _lost(value, owned[here[-1]], current, here)
            elif value != [] or current:  # a list that is merged item by item has no owner while it is empty
                yield here
    elif isinstance(wanted, list):
        items = {_normalized(part): fields for part, fields in owned.items()}
        for part, item in zip(_parts(wanted, owned), wanted, strict=True):
            if part in items:
                yield from _lost(item, items[part], None, (*path, part))
            else:
                yield (*path, part)


def _parts(items: Iterable[Any], owned: Iterable[str]) -> Iterator[str]:
    """Yield the parts of paths that stand for list items: their keys as in the set `owned`, or their values."""
    keys = next((keys for part in owned if (keys := list_keys(part))), {})
    for item in items:
        if isinstance(item, dict):
            yield f"k:{_written({key: item.get(key, _DEFAULT_KEYS.get(key)) for key in keys})}"
        else:
            yield f"v:{_written(item)}"


@lru_cache(maxsize=4096)
def _normalized(part: str) -> str:
    return part[:2] + _written(json.loads(part[2:])) if part[:2] in ("k:", "v:") else part


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
