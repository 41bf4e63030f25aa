"""Rewrites `oneOf` to `anyOf` where no value can match two of its schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from fastgen.text.grammars.schemas.errors import SchemaError

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
# References and `allOf` that are followed to find the values of a tag.
_MOST_HOPS = 4
# Every option is compared with every other.
_MOST_OPTIONS = 256

# Returns the schema that a normalized `$ref` refers to.
Resolve = Callable[[str], Any]


def exclusive(options: Sequence[Any], resolve: Resolve, place: str) -> list[Any]:
    """Return schemas for an `anyOf` that replaces a `oneOf` of `options`.

    Options overlap unless their types or their constants differ, or those of one property: the tag, which discriminated
    unions have. Where a tag is optional, the result requires it: only then do the options differ.

    Args:
        options: normalized schemas.
        resolve: finds the schemas of their references.
        place: of the `oneOf`, for errors.

    Raises:
        SchemaError: if two options may overlap, or there are too many to compare.
    """
    if len(options) > _MOST_OPTIONS:
        raise SchemaError.at(
            place,
            f"has {len(options)} schemas; at most {_MOST_OPTIONS} are compared, to find out whether a value may match "
            "two of them; use anyOf",
        )
    found = [_Option(option, resolve) for option in options]
    tags: set[str] = set()
    for left, right in combinations(found, 2):
        if left.types.isdisjoint(right.types) or _differ(left.values, right.values):
            continue
        shared = [name for name in left.tags if _differ(left.tags[name], right.tags.get(name))]
        if left.types & right.types != {"object"} or not shared:
            raise SchemaError.at(
                place,
                "cannot be enforced, because a value may match two of its schemas; use anyOf, or give each object a "
                "required property with a constant of its own",
            )
        tags.add(next((name for name in shared if name in tags), shared[0]))
    if not tags:
        return list(options)
    return [
        {"allOf": [option, {"type": sorted(each.types), "required": sorted(tags & set(each.tags))}]}
        if "object" in each.types and not tags.isdisjoint(each.tags)
        else option
        for option, each in zip(options, found, strict=True)
    ]


def _differ(left: frozenset[str] | None, right: frozenset[str] | None) -> bool:
    return left is not None and right is not None and left.isdisjoint(right)


class _Option:
    """What is known of all values that match a schema: types, constants, and constants of properties."""

    def __init__(self, schema: Any, resolve: Resolve) -> None:
        self.types = _TYPES
        self.values: frozenset[str] | None = None
        self.tags: dict[str, frozenset[str]] = {}
        self._read(schema, resolve, _MOST_HOPS)

    def _read(self, schema: Any, resolve: Resolve, hops: int) -> None:
        if schema is False:
            self.types = frozenset()
        if not isinstance(schema, Mapping) or not hops:
            return
        self.types &= types_of(schema)
        values = _constants(schema)
        if values is not None:
            self.values = values if self.values is None else self.values & values
        for name, property_schema in schema.get("properties", {}).items():
            tag = _values(property_schema, resolve, _MOST_HOPS)
            if tag is not None:
                self.tags[name] = tag & self.tags.get(name, tag)
        for part in schema.get("allOf", ()):
            self._read(part, resolve, hops - 1)
        if "$ref" in schema:
            self._read(resolve(schema["$ref"]), resolve, hops - 1)


def _values(schema: Any, resolve: Resolve, hops: int) -> frozenset[str] | None:
    """Return the constants of a schema, those of its references and `allOf` included; None if it has none."""
    if not isinstance(schema, Mapping) or not hops:
        return None
    parts = [*schema.get("allOf", ()), *([resolve(schema["$ref"])] if "$ref" in schema else ())]
    found = [values for part in parts if (values := _values(part, resolve, hops - 1)) is not None]
    own = _constants(schema)
    found += [] if own is None else [own]
    return frozenset.intersection(*found) if found else None


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the values of a schema, as its own keywords limit them; integers count as numbers."""
    found = schema.get("type", sorted(_TYPES))
    types = frozenset(
        "number" if name == "integer" else name for name in ([found] if isinstance(found, str) else found)
    )
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return types if constants is None else types & {type_of(value) for value in constants}


def type_of(value: object) -> str:
    """Return the JSON type of a value; integers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _constants(schema: Mapping[str, Any]) -> frozenset[str] | None:
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if constants is None else frozenset(map(_canonical, constants))


def _canonical(value: Any) -> str:
    """Return a text that is the same for equal values of JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)
