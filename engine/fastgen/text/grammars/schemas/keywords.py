"""Keywords of one schema: which are applied, which have no effect, and which cannot be enforced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fastgen.text.grammars.schemas.errors import SchemaError, within

JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_Schema = Mapping[str, Any]
# Keywords that apply schemas to the same value: what these evaluate is not visible in the schema itself.
_IN_PLACE = frozenset({"anyOf", "allOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "not"})

# Keywords of JSON Schema that llguidance does not implement, each with the condition under which it has no effect.
_UNENFORCEABLE: dict[str, Callable[[_Schema], bool]] = {
    "not": lambda schema: schema["not"] is False,
    "if": lambda schema: not {"then", "else"} & set(schema),
    "then": lambda schema: "if" not in schema,
    "else": lambda schema: "if" not in schema,
    "uniqueItems": lambda schema: not _boolean(schema["uniqueItems"]) or _is_at_most_one(schema.get("maxItems")),
    "contains": lambda schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "dependentRequired": lambda schema: not any(schema["dependentRequired"].values()),
    "dependentSchemas": lambda schema: not schema["dependentSchemas"],
    "dependencies": lambda schema: all(each in ([], True, {}) for each in schema["dependencies"].values()),
    "disallow": lambda schema: schema["disallow"] == [],
    "propertyNames": lambda schema: _says_nothing_of_names(schema["propertyNames"]),
    "unevaluatedItems": lambda schema: schema["unevaluatedItems"] in (True, {}),
    "unevaluatedProperties": lambda schema: schema["unevaluatedProperties"] in (True, {}),
    "$dynamicRef": lambda _: False,
    "$recursiveRef": lambda _: False,
}


def applied(schema: _Schema, place: str) -> dict[str, Any] | Literal[False]:
    """Return the keywords of a schema in the spelling of draft 2020-12; False if nothing matches it.

    Keywords of older drafts are replaced by those of this draft, and unsupported ones by supported ones where those
    mean the same.

    Raises:
        SchemaError: if one of them has the wrong type or cannot be enforced.
    """
    found = dict(schema)
    if schema.get("not") in (True, {}) and "not" in schema:
        return False
    _rename_items(found)
    _rename_draft_3(found)
    _rewrite_unevaluated(found)
    _rewrite_property_names(found)
    _declare_matched_names(found, place)
    for keyword, says_nothing in _UNENFORCEABLE.items():
        if keyword in found:
            try:
                ignored = says_nothing(found)
            except (AttributeError, TypeError):
                raise SchemaError.at(within(place, keyword), "has the wrong type") from None
            if not ignored:
                raise SchemaError.at(within(place, keyword), "cannot be enforced; leave it out")
    if "const" in found and "enum" in found:
        found["allOf"] = [*_listed(found.get("allOf")), {"enum": found.pop("enum")}]
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _is_at_most_one(most: Any) -> bool:
    return isinstance(most, int) and most <= 1


def _says_nothing_of_names(schema: Any) -> bool:
    """Return whether all names match a schema: names are strings."""
    if isinstance(schema, bool):
        return schema
    return set(schema) <= {"type", "$schema", "title", "description", "$comment"} and (
        "string" in ([types] if isinstance(types := schema.get("type", "string"), str) else types)
    )


def _rename_items(found: dict[str, Any]) -> None:
    if isinstance(found.get("items"), list):
        first, rest = found.pop("items"), found.pop("additionalItems", True)
        found.update({"prefixItems": first} if first else {}, items=rest)


def _rename_draft_3(found: dict[str, Any]) -> None:
    """Replace `divisibleBy`, `extends` and booleans in `required`, which a property has instead of its object."""
    others = [{"multipleOf": found.pop("divisibleBy")}] if "divisibleBy" in found else []
    if "extends" in found:
        extended = found.pop("extends")
        others += extended if isinstance(extended, list) else [extended]
    if others:
        found["allOf"] = [*_listed(found.get("allOf")), *others]
    properties = found.get("properties")
    if not isinstance(properties, Mapping):
        return
    said = {
        name: schema["required"]
        for name, schema in properties.items()
        if isinstance(schema, Mapping) and isinstance(schema.get("required"), bool)
    }
    if said and isinstance(found.get("required", []), list):
        found["required"] = [*found.get("required", ()), *(name for name, is_required in said.items() if is_required)]
        found["properties"] = {
            name: {key: value for key, value in schema.items() if key != "required"} if name in said else schema
            for name, schema in properties.items()
        }


def _rewrite_unevaluated(found: dict[str, Any]) -> None:
    """Rename `unevaluatedProperties` to `additionalProperties` and `unevaluatedItems` to `items`.

    If these are given, drop the former. They mean the same where no other schema applies to the same value; otherwise
    they stay.
    """
    if not _IN_PLACE.isdisjoint(found):
        return
    for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name in found and (name != "unevaluatedItems" or "contains" not in found):
            rest = found.pop(name)
            found.setdefault(plain, rest)


def _rewrite_property_names(found: dict[str, Any]) -> None:
    """Replace `propertyNames` with declared names or a pattern, if there are no properties, as in zod's records."""
    names = found.get("propertyNames")
    if not isinstance(names, Mapping) or found.get("properties") or found.get("patternProperties"):
        return
    asked = set(names) - {"type", "$schema", "title", "description", "$comment"}
    if names.get("type", "string") != "string" or len(asked) != 1 or not _IN_PLACE.isdisjoint(found):
        return
    (keyword,) = asked
    choices = names["enum"] if keyword == "enum" else [names["const"]] if keyword == "const" else None
    value = found.get("additionalProperties", True)
    if choices is not None and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        required = [name for name in _listed(found.get("required")) if isinstance(name, str)]
        if set(required) <= set(choices):
            found["properties"] = dict.fromkeys(choices, value)
    elif keyword == "pattern" and isinstance(names["pattern"], str) and not found.get("required"):
        found["patternProperties"] = {names["pattern"]: value}
    else:
        return
    found["additionalProperties"] = False
    del found["propertyNames"]


# A pattern that lists whole names, without any other operator.
_NAMES = re.compile(r"\^\(?(?:\?:)?((?:[\w\- ]|\\[^\w\s])+(?:\|(?:[\w\- ]|\\[^\w\s])+)*)\)?\$", re.ASCII)
# Operators with which a pattern may match infinitely many names.
_ENDLESS = re.compile(r"[*+]|\{\d+,\}")


def _declare_matched_names(found: dict[str, Any], place: str) -> None:
    """Move the names that a pattern of `patternProperties` lists to `properties`.

    The library lets a generation begin another property of a pattern although all of its names may be taken.

    Raises:
        SchemaError: if a declared or required name matches a pattern with a limited number of names.
    """
    patterns = found.get("patternProperties")
    if not isinstance(patterns, Mapping):
        return
    declared = dict(found["properties"]) if isinstance(found.get("properties"), Mapping) else {}
    kept = {}
    for pattern, schema in patterns.items():
        listed = _NAMES.fullmatch(pattern) if pattern.count("(") == pattern.count(")") else None
        if listed is None or ("|" in pattern and "(" not in pattern):
            kept[pattern] = schema
            continue
        for name in listed[1].split("|"):
            plain = re.sub(r"\\(.)", r"\1", name)
            declared[plain] = {"allOf": [declared[plain], schema]} if plain in declared else schema
    found["properties"], found["patternProperties"] = declared, kept
    for pattern in kept:
        is_endless = _ENDLESS.search(pattern) or not (pattern.startswith("^") and pattern.endswith("$"))
        taken = next((name for name in [*declared, *_listed(found.get("required"))] if _matches(pattern, name)), None)
        if taken is not None and not is_endless:
            raise SchemaError.at(
                within(place, "patternProperties", pattern),
                f"matches {taken[:40]!r} and a limited number of other names; declare them in properties",
            )


def _matches(pattern: str, name: Any) -> bool:
    try:
        return isinstance(name, str) and re.search(pattern, name) is not None
    except re.error:
        return False
