"""Convert a bare-text parameter value by its JSON schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from fastgen.text.tools.json_text import dumped, loaded, strict

# Bound on chained references, which a client may make circular.
_LONGEST_CHAIN = 8


class ParameterSchema:
    """The schema of one parameter. Schemas come from clients and may contain anything.

    Attributes:
        schema: schema of the parameter, with the definitions that it can refer to.
        types: allowed JSON types; empty if not restricted.
        choices: allowed values, if the schema lists them.

    Args:
        tool: schema of all arguments.
        name: name of the parameter, which may be undeclared.
    """

    def __init__(self, tool: Mapping[str, Any], name: str) -> None:
        own = _resolved(_mapping(tool.get("properties")).get(name), tool)
        definitions = {key: tool[key] for key in ("$defs", "definitions") if key in tool}
        self.schema: Mapping[str, Any] = {**definitions, **own}
        self.types = _types(own, tool)
        self.choices = [own["const"]] if "const" in own else _list(own.get("enum"))

    @property
    def is_text(self) -> bool:
        """Return whether the value is the text itself: the schema allows only strings, or names no type."""
        return self.types <= {"string"}

    def value(self, text: str) -> str:
        """Return the JSON value of the text.

        As in vLLM, text that is not JSON stays text. Python's spelling of constants, lists and dictionaries is
        accepted, because some templates render earlier calls that way.
        """
        if self.is_text or any(choice == text for choice in self.choices if isinstance(choice, str)):
            return dumped(text)
        bare = text.strip()
        constant, may_be_text = bare.lower(), "string" in self.types
        if constant in ("null", "none") and ("null" in self.types or not may_be_text):
            return "null"
        if constant in ("true", "false") and "boolean" in self.types and not may_be_text:
            return constant
        value = loaded(bare)
        if value is None and self.types & {"array", "object"} and not may_be_text:
            return _of_python(bare) or dumped(text)
        if value is None or (may_be_text and not self.types & _types_of_value(value) - {"string"}):
            return dumped(text)
        return strict(bare)


def _of_python(text: str) -> str | None:
    """Return a list or dictionary in Python's spelling as JSON; None if the text is neither."""
    try:
        value = ast.literal_eval(text)
        return (
            strict(json.dumps(value, ensure_ascii=False, allow_nan=False)) if isinstance(value, list | dict) else None
        )
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def declared_parameters(tool: Mapping[str, Any]) -> tuple[list[str], frozenset[str]]:
    """Return the declared parameters in order, and the required ones."""
    required = [name for name in _list(tool.get("required")) if isinstance(name, str)]
    return list(dict.fromkeys([*_mapping(tool.get("properties")), *required])), frozenset(required)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its reference resolved."""
    found = _mapping(schema)
    for _ in range(_LONGEST_CHAIN):
        if "$ref" not in found:
            break
        beside = {key: value for key, value in found.items() if key != "$ref"}
        found = {**_referred(found["$ref"], root), **beside}
    return found


def _referred(reference: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: object = root
    for part in str(reference).removeprefix("#/").split("/"):
        found = _mapping(found).get(part)
    return _mapping(found)


def _types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types of a schema, over all of its alternatives."""
    types: set[str] = set()
    followed: set[str] = set()  # a schema may refer to itself
    pending = [schema]
    while pending:
        schema = pending.pop()
        declared = schema.get("type")
        if declared is not None:
            types |= {kind for kind in (declared, *_list(declared)) if isinstance(kind, str)}
        elif "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _list(schema["enum"])
            types = types.union(*map(_types_of_value, values))
        else:
            parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))]
            pending += map(_mapping, parts)
            reference = str(schema.get("$ref"))
            if reference not in followed:
                followed.add(reference)
                pending.append(_referred(reference, root))
    return frozenset(types)


def _types_of_value(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
