"""Rewrite a JSON schema so that llguidance enforces it exactly.

The library accepts more than it can follow, and rejects keywords that have no effect. What it gets is a document of the
keywords that it implements, with bounds in the form that it computes with and every reference to `$defs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastgen.text.grammars.schemas import keywords
from fastgen.text.grammars.schemas.alternatives import exclusive
from fastgen.text.grammars.schemas.errors import SchemaError, within
from fastgen.text.grammars.schemas.numbers import BOUNDS, check_steps, check_value, float_bounds, integer_bounds, step
from fastgen.text.grammars.schemas.recursion import check_recursion
from fastgen.text.grammars.schemas.references import References, check_base

# Deepest nesting of schemas within schemas. The library reads 128 levels of JSON, and a schema takes up to two.
_MOST_LEVELS = 48
# Schemas in a document, references counted once: bounds the time to normalize it.
_MOST_SCHEMAS = 20_000
# Formats that the library enforces. All others are annotations, which is what JSON Schema says of unknown ones.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "$ref"})
_LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def normalized(schema: object) -> dict[str, Any]:
    """Return an equivalent schema that llguidance enforces.

    It matches fewer values in three cases: integers beyond 2^53 (`integer_bounds`), numbers next to an exclusive bound
    of 0 (`float_bounds`), and objects without the property that tells the schemas of a `oneOf` apart (`exclusive`).

    Raises:
        SchemaError: if the schema is invalid, or a keyword cannot be enforced. The message names it.
    """
    return _Normalizer(schema).document()


def normalized_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are always an object.

    Raises:
        SchemaError: if the schema is invalid, cannot be enforced, or does not match objects.
    """
    document = normalized(schema)
    types = document.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise SchemaError.at("type", 'must be "object": arguments are objects')
    if document.get("type") == "object":
        return document
    definitions = document.pop("$defs", None)
    return {"allOf": [{"type": "object"}, document]} | ({} if definitions is None else {"$defs": definitions})


class _Normalizer:
    def __init__(self, document: object) -> None:
        self._document = document
        self._references = References(document)
        self._names: dict[int, str] = {}  # of referenced schemas, by identity: they are parts of the document
        self._referenced: list[tuple[str, Any, str]] = []  # name, schema and place of those not yet normalized
        self._definitions: dict[str, Any] = {}
        self._places: dict[str, str] = {}  # of the definitions, in the document
        self._one_ofs: list[tuple[dict[str, Any], str]] = []  # schemas with `oneOf`, and their places
        self._num_schemas = 0
        self._steps: list[int | float] = []  # values of `multipleOf`
        self._merges = False  # whether several schemas may apply to one value
        self._handlers: dict[str, Callable[[Any, str, int], Any]] = {
            **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), self._list),
            **dict.fromkeys(("additionalProperties", "items"), self.schema),
            **dict.fromkeys(("properties", "patternProperties"), self._map),
            **dict.fromkeys(_LENGTHS, _length),
            "$ref": self._reference,
            "type": _types,
            "enum": _constants,
            "const": _constant,
            "required": _names,
            "pattern": _pattern,
        }

    def document(self) -> dict[str, Any]:
        root = self.schema(self._document, "", 0)
        while self._referenced:
            name, target, place = self._referenced.pop()
            self._places[name] = place
            self._definitions[name] = self.schema(target, place, 0)
        check_recursion(root, self._definitions, self._places)
        if self._merges:
            check_steps(self._steps)
        for schema, place in self._one_ofs:  # now that all that they refer to is known
            self._make_exclusive(schema, place)
        root = root if isinstance(root, dict) else {"allOf": [root]} if root is False else {}
        return root | ({"$defs": self._definitions} if self._definitions else {})

    def schema(self, given: Any, place: str, level: int) -> Any:
        """Return a normalized schema: an object or a boolean."""
        self._num_schemas += 1
        if level > _MOST_LEVELS:
            raise SchemaError.at(place, f"is nested more than {_MOST_LEVELS} levels deep; flatten the schema")
        if self._num_schemas > _MOST_SCHEMAS:
            raise SchemaError(f"has more than {_MOST_SCHEMAS} schemas within it; shorten it")
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise SchemaError.at(place, "must be a schema, which is an object or a boolean")
        if given is not self._document:
            check_base(given, place)
        known = keywords.applied(given, place)
        if known is False:
            return False
        found: dict[str, Any] = {}
        for keyword, value in known.items():
            handle = self._handlers.get(keyword)
            if handle is not None:
                found[keyword] = handle(value, within(place, keyword), level + 1)
            elif keyword == "format" and isinstance(value, str) and value in _FORMATS:
                found[keyword] = value
        _add_bounds(found, known, place)
        if "multipleOf" in found:
            self._steps.append(found["multipleOf"])
        self._merges |= "allOf" in found or (len(found) > 1 and not _ALTERNATIVES.isdisjoint(found))
        _check_number_of_properties(found, place)
        if "oneOf" in found:
            self._one_ofs.append((found, place))
        return found

    def _make_exclusive(self, schema: dict[str, Any], place: str) -> None:
        """Turn `oneOf` into an `anyOf` in its place: the library merges keywords in their order."""
        options = exclusive(
            schema["oneOf"],
            lambda reference: self._definitions[reference.rpartition("/")[2]],
            within(place, "oneOf"),
        )
        keywords_in_order = dict(schema)
        schema.clear()
        for keyword, value in keywords_in_order.items():
            if keyword == "oneOf" and "anyOf" in keywords_in_order:
                schema["allOf"] = [*keywords_in_order.get("allOf", ()), {"anyOf": options}]
            elif keyword == "oneOf":
                schema["anyOf"] = options
            else:
                schema.setdefault(keyword, value)

    def _reference(self, reference: Any, place: str, _level: int) -> str:
        target = self._references.target(reference, place)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._referenced.append((name, target, reference.removeprefix("#").lstrip("/").replace("/", ".")))
        return f"#/$defs/{name}"

    def _list(self, value: Any, place: str, level: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise SchemaError.at(place, "must be a list of schemas, and not empty")
        return [self.schema(part, within(place, index), level) for index, part in enumerate(value)]

    def _map(self, value: Any, place: str, level: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError.at(place, "must be an object of schemas")
        return {name: self.schema(part, within(place, name), level) for name, part in value.items()}


def _add_bounds(found: dict[str, Any], given: Mapping[str, Any], place: str) -> None:
    """Add the bounds of numbers and `multipleOf`, if the schema allows numbers."""
    if not any(name in given for name in BOUNDS):
        return
    types = found.get("type", "number")
    is_integer = "integer" in types and "number" not in types
    if not is_integer and "number" not in types:
        return  # they do not apply to other types
    if given.get("multipleOf") is not None:
        found["multipleOf"] = step(given["multipleOf"], within(place, "multipleOf"))
    found.update(integer_bounds(given, place) if is_integer else float_bounds(given, place))


def _check_number_of_properties(found: dict[str, Any], place: str) -> None:
    """Drop a `minProperties` that the required properties satisfy; reject one for which names might be repeated."""
    least, num_required = found.get("minProperties", 0), len(found.get("required", ()))
    if least <= num_required:
        found.pop("minProperties", None)
    elif least > 1 and (found.get("additionalProperties", True) is not False or found.get("patternProperties")):
        raise SchemaError.at(
            within(place, "minProperties"),
            "more than 1 cannot be enforced, because a name might be repeated; declare and require the properties",
        )


def _types(value: Any, place: str, _level: int) -> Any:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not types or not all(isinstance(name, str) for name in types):
        raise SchemaError.at(place, "must be the name of a type, or a list of them")
    unknown = next((name for name in types if name not in keywords.JSON_TYPES), None)
    if unknown is not None:
        raise SchemaError.at(place, f"{unknown[:40]!r} is not one of {', '.join(sorted(keywords.JSON_TYPES))}")
    kept = list(dict.fromkeys(name for name in types if not (name == "integer" and "number" in types)))
    return kept[0] if len(kept) == 1 else kept


def _constants(value: Any, place: str, _level: int) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SchemaError.at(place, "must be a list of values, and not empty")
    check_value(value, place)
    return list({json.dumps(constant, sort_keys=True): constant for constant in value}.values())


def _constant(value: Any, place: str, _level: int) -> Any:
    check_value(value, place)
    return value


def _names(value: Any, place: str, _level: int) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError.at(place, "must be a list of names")
    return list(dict.fromkeys(value))


def _length(value: Any, place: str, _level: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError.at(place, "must be an integer, at least 0")
    return min(int(value), (1 << 63) - 1)


def _pattern(value: Any, place: str, _level: int) -> str:
    if not isinstance(value, str):
        raise SchemaError.at(place, "must be a regular expression in a string")
    if re.search(r"\(\?(=|!|<=|<!)", value):
        raise SchemaError.at(place, "lookaround cannot be enforced; write the regular expression without it")
    return _CLASS.sub(_class_of_rust, value)


# An escape, or a character class of ECMA-262, which ends at the first bracket.
_CLASS = re.compile(r"\\.|\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)


def _class_of_rust(found: re.Match[str]) -> str:
    """Return a class in the library's syntax, where brackets, `&&`, `--` and `~~` within classes are operators."""
    if found[0].startswith("\\"):
        return found[0]
    if not found[2]:
        return "(?s:.)" if found[1] else "[^\\s\\S]"  # any character, and none
    body = re.sub(r"\\.|[\[&~]|-(?=-)", lambda part: part[0] if len(part[0]) > 1 else f"\\{part[0]}", found[2])
    return f"[{found[1]}{body}]"
