"""Generates edits of every field of the CRD's schema, from a spec that sets each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastgen_operator.api.crd import custom_resource_definition
from fastgen_operator.kinds import Object

Path = tuple[str | int, ...]

# Other values of fields with a restricted format, by field name.
_OTHERS: Object = {
    "tokenBudget": "auto",
    "interTokenTarget": "off",
    "swapSpace": "2Gi",
    "size": "20Gi",
    "cidr": "10.0.0.0/7",
    "blockSize": 128,
    # Rounded to the probe's period of two seconds: one second more would change nothing.
    "startupDeadlineSeconds": 400,
    "requests": {"example.com/disk": 1},
    "limits": {"example.com/disk": 1},
    "spec": {"nodeSelector": {"extra": "yes"}},
    "affinity": {"podAntiAffinity": {}},
    "resourceClaims": [{"name": "other", "resourceClaimName": "device"}],
    # A second schedule of the same name would be rejected.
    "schedules": [{"name": "other", "start": "0 2 29 feb *", "durationSeconds": 60, "minReplicas": 4}],
}


@dataclass(frozen=True)
class Edit:
    """One edited field: `spec` is the complete edited spec, `what` describes the edit of the field at `path`."""

    path: Path
    what: str
    spec: Object

    @property
    def field(self) -> str:
        """Name of the field."""
        return next(str(part) for part in reversed(self.path) if isinstance(part, str))

    def __str__(self) -> str:
        return f"{dotted(self.path)} {self.what}"


def dotted(path: Path) -> str:
    """Format a path as in spec.network.allowFrom[0].ipBlock."""
    return "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def spec_schema() -> Object:
    """Return the schema of the spec from the API server's CRD."""
    version = custom_resource_definition()["spec"]["versions"][0]
    schema: Object = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def fields(schema: Object, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every field of the schema; list items have index 0."""
    for name, child in schema.get("properties", {}).items():
        yield (*path, name)
        yield from fields(child, (*path, name))
        yield from fields(child.get("items", {}), (*path, name, 0))


def edits_of(base: Object) -> Iterator[Edit]:
    """Yield edits that remove, empty and change every field of the spec, and set it to and beyond its bounds."""
    yield from _edits(base, spec_schema(), base, ())


def _edits(base: Object, schema: Object, value: Any, path: Path) -> Iterator[Edit]:
    for name, child in schema.get("properties", {}).items():
        if name not in value:
            continue
        here, held = (*path, name), value[name]
        yield Edit(here, "removed", _with(base, here, None))
        for what, other in _values(name, child, held):
            yield Edit(here, what, _with(base, here, other))
        yield from _edits(base, child, held, here) if isinstance(held, dict) else ()
        for index, item in enumerate(held) if isinstance(held, list) and isinstance(held[:1], list) else ():
            if isinstance(item, dict):
                yield from _edits(base, child["items"], item, (*here, index))


def _values(name: str, schema: Object, held: Any) -> Iterator[tuple[str, Any]]:
    """Yield other values of a field, with a description of each."""
    kind = schema.get("type", "integer")
    yield "empty", {"string": "", "integer": 0, "boolean": False, "array": [], "object": {}}[kind]
    if "minimum" in schema:
        yield "at its minimum", schema["minimum"]
        yield "below its minimum", schema["minimum"] - 1
    if "maximum" in schema:
        yield "at its maximum", schema["maximum"]
        yield "above its maximum", schema["maximum"] + 1
    if "maxLength" in schema:
        yield "too long", "x" * (schema["maxLength"] + 1)
    if "maxItems" in schema and held:
        yield "with too many items", [held[0]] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield "with too many entries", {f"example.com/{number}": "1" for number in range(schema["maxProperties"] + 1)}
    if kind != "object" or "properties" not in schema:
        yield "changed", _other(name, schema, held)


def _other(name: str, schema: Object, held: Any) -> Any:
    if name == "accessMode":
        return "ReadWriteMany" if held == "ReadWriteOnce" else "ReadWriteOnce"
    if name in _OTHERS:
        return _OTHERS[name]
    if "enum" in schema:
        return next(word for word in schema["enum"] if word != held)
    if isinstance(held, bool):
        return not held
    if isinstance(held, int):
        return held + 1
    if isinstance(held, str):
        return f"{held}x"
    if isinstance(held, list):
        return [*held, *held[:1]] if held else [{}]
    return {**held, "extra": "yes"}


def _with(base: Object, path: Path, value: Any) -> Object:
    """Return a copy with the field set, or removed if `value` is None."""
    spec = copy.deepcopy(base)
    place: Any = spec
    for part in path[:-1]:
        place = place[part]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = copy.deepcopy(value)
    return spec
