"""Definitions of a JSON schema that refer to themselves in a way that no value matches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from fastgen.text.grammars.endings import with_an_end, without_a_match
from fastgen.text.grammars.schemas.alternatives import types_of
from fastgen.text.grammars.schemas.errors import SchemaError

# What a value is: only the first two have parts.
_KINDS = ("array", "object", "other")


def check_recursion(definitions: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Check normalized definitions.

    Args:
        definitions: the schemas by name.
        places: where each of them is in the document.

    Raises:
        SchemaError: if one requires itself for the same value, or within each value: nothing matches it. Lists of it
            have dead ends, and a generation that comes to it never ends.
    """
    try:
        TopologicalSorter({name: set(_required(schema)) for name, schema in definitions.items()}).prepare()
    except CycleError:
        raise SchemaError("$ref: a schema refers to itself for the same value, so nothing matches it") from None
    endless = _Values(definitions).endless_definition()
    if endless is not None:
        raise SchemaError.at(
            places[endless],
            "each value needs another one of the same schema within it, so none ends; do not require the property, or "
            "let the list be empty",
        )


def _required(schema: Any) -> Iterator[str]:
    """Return the names of the definitions that a value of a schema has to match, too."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield _name(schema["$ref"])
        for part in schema.get("allOf", ()):
            yield from _required(part)


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


class _Values:
    """What values of definitions need, as rules of a grammar.

    A definition is a rule with an alternative for each kind of value, such as `d0 array`. Parts of schemas are rules
    with a number as their name. Where a keyword is not looked at, more values count as possible.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._needs: dict[str, list[list[str]]] = {}
        for name, schema in definitions.items():
            self._needs[name] = [[f"{name} {kind}"] for kind in _KINDS]
            for kind in _KINDS:
                self._needs[f"{name} {kind}"] = _possible(self._of_kind(schema, kind))

    def endless_definition(self) -> str | None:
        """Return the name of a definition that no finite value matches; None if there is none."""
        endless = {*self._needs} - with_an_end(self._needs) - without_a_match(self._needs)
        symbol = next((name for name in self._definitions if name in endless), None)
        if symbol is None:
            return None
        # Parts refer only to smaller parts and to definitions, so every loop comes to a definition.
        seen: set[str] = set()
        while symbol not in seen or symbol.isdecimal():
            seen.add(symbol)
            symbol = next(each for needed in self._needs[symbol] for each in needed if each in endless)
        return symbol.partition(" ")[0]

    def _value(self, schema: Any) -> str:
        """Return the symbol of a value of any kind that matches a schema."""
        if isinstance(schema, Mapping) and [*schema] == ["$ref"]:
            return _name(schema["$ref"])
        return self._one_of([self._of_kind(schema, kind) for kind in _KINDS])

    def _one_of(self, alternatives: Sequence[list[str] | None]) -> str:
        symbol = str(len(self._needs))
        self._needs[symbol] = _possible(*alternatives)
        return symbol

    def _of_kind(self, schema: Any, kind: str) -> list[str] | None:
        """Return the symbols that a value of a kind needs to match a schema; None if none of this kind matches."""
        if isinstance(schema, bool):
            return [] if schema else None
        if kind not in {name if name in _KINDS else "other" for name in types_of(schema)}:
            return None
        needed: list[str] = []
        if not {"const", "enum"} & {*schema}:
            needed += self._items(schema) if kind == "array" else self._properties(schema) if kind == "object" else []
        for part in schema.get("allOf", ()):
            also = self._of_kind(part, kind)
            if also is None:
                return None
            needed += also
        if "$ref" in schema:
            needed.append(f"{_name(schema['$ref'])} {kind}")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                needed.append(self._one_of([self._of_kind(part, kind) for part in schema[keyword]]))
        return needed

    def _items(self, schema: Mapping[str, Any]) -> list[str]:
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        rest = [schema.get("items", True)] if least > len(first) else []
        return [self._value(part) for part in [*first[:least], *rest]]

    def _properties(self, schema: Mapping[str, Any]) -> list[str]:
        declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        required, others = schema.get("required", ()), schema.get("additionalProperties", True)
        undeclared = self._one_of([[self._value(part)] for part in (*patterns.values(), others)])
        needed = [self._value(declared[name]) if name in declared else undeclared for name in required]
        if schema.get("minProperties", 0) > len(required):
            optional = [self._value(part) for name, part in declared.items() if name not in {*required}]
            needed.append(self._one_of([[symbol] for symbol in (*optional, undeclared)]))
        return needed


def _possible(*alternatives: list[str] | None) -> list[list[str]]:
    return [needed for needed in alternatives if needed is not None]
