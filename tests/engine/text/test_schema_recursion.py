"""A schema whose values contain each other without end is refused by the place of a definition; others are not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from engine.text.matching import byte_tokenizer
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.grammars.endings import with_an_end, without_a_match
from fastgen.text.grammars.lark import arguments_body
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.grammars.schemas.normalize import normalized

SELF = {"$ref": "#/$defs/a"}
OTHER = {"$ref": "#/$defs/b"}
KEYS = {"pattern": "^k"}
HAS_CHILD = {"required": ["x"], "properties": {"x": SELF}}
ENDLESS = {"type": "object", **HAS_CHILD}
CLOSED = {"properties": {"x": True}, "additionalProperties": False}


def document(a: Any, b: Any = True) -> dict[str, Any]:
    """Return a schema with definitions, which it refers to in a property that may be left out."""
    return {"type": "object", "properties": {"p": SELF}, "$defs": {"a": a, "b": b}}


@pytest.mark.parametrize(
    "schema",
    [
        document({"type": "object", **HAS_CHILD}),
        document({"type": "array", "minItems": 1, "items": SELF}),
        document({"type": "array", "minItems": 2, "prefixItems": [{}], "items": SELF}),
        document({"type": "array", "minItems": 1, "prefixItems": [SELF]}),
        document({"type": "array", "minItems": 1, "items": [SELF]}),  # of older drafts
        document({"type": "object", "minProperties": 1, "additionalProperties": SELF}),
        document({"type": "object", "minProperties": 1, "propertyNames": KEYS, "additionalProperties": SELF}),
        document({"type": "object", "minProperties": 1, "properties": {"k": SELF}, "additionalProperties": False}),
        document({"type": "object", "required": ["k"], "additionalProperties": SELF}),
        document({"type": "object", "required": ["k"], "patternProperties": {"^(k|l)$": SELF}}),
        document({"type": "object", "properties": {"x": {**SELF, "required": True}}}),  # of draft 3
        document({"type": ["array", "object"], "minItems": 1, "items": SELF, **HAS_CHILD}),
        document({"anyOf": [{"type": "object", **HAS_CHILD}, {"type": "array", "minItems": 1, "items": SELF}]}),
        document({"oneOf": [{"type": "object", **HAS_CHILD}, {"type": "array", "minItems": 1, "items": SELF}]}),
        document({"allOf": [{"type": "object"}, HAS_CHILD]}),
        document({"allOf": [OTHER, HAS_CHILD]}, {"type": "object", "properties": {"name": {"type": "string"}}}),
        document({"type": "object", "anyOf": [HAS_CHILD, {"type": "string"}]}),
        document({"type": "array", "minItems": 1, "items": OTHER}, {"type": "object", **HAS_CHILD}),
        document({"type": "object", "required": ["x"], "properties": {"x": {"anyOf": [SELF, False]}}}),
        # Only together do these require another value.
        document({"allOf": [{"type": "object", "required": ["x"]}, {"properties": {"x": SELF}}]}),
        document({"type": "object", "required": ["x"], "allOf": [{"properties": {"x": SELF}}]}),
        document({"type": "object", "required": ["x"], **OTHER}, {"properties": {"x": SELF}}),
        document(
            {"type": "object", "required": ["x"], "anyOf": [{"properties": {"x": SELF}}, {"required": ["y"], **OTHER}]},
            {"properties": {"x": SELF}},
        ),
        document({"allOf": [{"type": "object", "minProperties": 1}, {"properties": {"x": SELF}}, CLOSED]}),
        document({"allOf": [{"type": "array", "minItems": 1}, {"items": SELF}]}),
        document({"allOf": [{"type": "array", "minItems": 1}, {"prefixItems": [SELF]}]}),
        document({"allOf": [{"type": "array", "minItems": 2, "prefixItems": [{}]}, {"items": SELF}]}),
        document({**HAS_CHILD, "allOf": [{"type": ["object", "null"]}, {"type": ["object", "array"]}]}),
        document(
            {"type": "object", "required": ["x"], "properties": {"x": {"type": "object", **OTHER}}},
            {"anyOf": [{"type": "null"}, SELF]},
        ),
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    ],
    ids=json.dumps,
)
def test_a_schema_whose_values_never_end_is_refused_by_its_place(schema: dict[str, Any]) -> None:
    place = r"\$defs\.[ab]: " if "$defs" in schema else ""
    for normalize in (normalized, arguments_body) if schema["type"] == "object" else (normalized,):
        with pytest.raises(SchemaError, match=f"^{place}each value needs another one of the same schema within it"):
            normalize(schema)


@pytest.mark.parametrize(
    "schema",
    [
        document({"type": "array", "items": SELF}),
        document({"type": "array", "prefixItems": [SELF]}),
        document({"type": "array", "minItems": 1, "prefixItems": [{}], "items": SELF}),
        document({"type": "object", "properties": {"x": SELF}}),
        document({"minProperties": 1, "properties": {"k": SELF, "l": {}}, "additionalProperties": False}),
        document({"type": "object", "minProperties": 1, "additionalProperties": {"anyOf": [SELF, {"type": "null"}]}}),
        document({"type": "object", "required": ["x"], "properties": {"x": {"anyOf": [SELF, {"type": "null"}]}}}),
        document({"type": "object", "required": ["x"], "properties": {"x": {"type": "array", "items": SELF}}}),
        document(HAS_CHILD),  # a number matches it, too
        document({"anyOf": [{"type": "object", **HAS_CHILD}, {"const": {"x": 1}}]}),
        document({"type": "object", **HAS_CHILD, "enum": [{"x": 1}]}),
        document({"type": "array", "minItems": 1, "items": OTHER}, {"type": ["null", "array"], "items": SELF}),
        # Nothing matches these definitions. The library reports that itself.
        document(False),
        document({"not": {}}),
        document({"type": "array", "minItems": 1, "items": OTHER}, False),
        # No generation comes to the value without end.
        {"type": "object", "$defs": {"a": ENDLESS}},
        {"type": "object", "properties": {"p": OTHER}, "$defs": {"a": ENDLESS, "b": {"type": "string", "items": SELF}}},
        {
            "type": "object",
            "properties": {"p": {"type": "array", "maxItems": 0, "items": SELF}},
            "$defs": {"a": ENDLESS},
        },
        {"type": "object", "properties": {"p": {"maxItems": 1, "prefixItems": [{}, SELF]}}, "$defs": {"a": ENDLESS}},
        {"type": "object", "properties": {"p": {"const": 1, "anyOf": [{"items": SELF}]}}, "$defs": {"a": ENDLESS}},
        {"type": "object", "maxProperties": 0, "properties": {"p": SELF}, "$defs": {"a": ENDLESS}},
        {"type": "object", "anyOf": [{"type": "array", "items": SELF}, {}], "$defs": {"a": ENDLESS}},
        document({"allOf": [{"type": ["object", "null"]}, HAS_CHILD]}),
        document({"type": "object", "required": ["x"], "anyOf": [{"properties": {"x": SELF}}, OTHER]}),
        document(
            {"type": "object", "required": ["x"], "properties": {"x": OTHER}}, {"anyOf": [{"type": "null"}, SELF]}
        ),
    ],
    ids=json.dumps,
)
def test_a_recursive_schema_with_values_that_end_is_left_to_the_library(schema: dict[str, Any]) -> None:
    assert normalized(schema)["type"] == "object"


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    found = GrammarChecker(byte_tokenizer(None))
    yield found
    found.close()


def test_a_request_is_told_what_to_change(checker: GrammarChecker) -> None:
    text = json.dumps(document({"type": "array", "minItems": 1, "items": SELF}))
    for grammar in (Grammar(kind="json_schema", text=text), Grammar(kind="lark", text=f"start: %json {text}")):
        with pytest.raises(RequestError, match=r"\$defs\.a: each value .*; do not require the property, or"):
            checker.check(grammar)


class Definitions:
    """Random definitions that refer to each other, and the smallest values of each, found by trying."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.names = ["d0", "d1", "d2"]
        self.schemas = {name: self._schema(2) for name in self.names}
        parts = {name: self._in_parts(schema) for name, schema in self.schemas.items()}
        self.document = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in self.names], "$defs": parts}

    def _schema(self, depth: int) -> Any:
        pick = self._random.random()
        if not depth or pick < 0.3:
            name = self._random.choice([*self.names, "null"])
            return {"type": "null"} if name == "null" else {"$ref": f"#/$defs/{name}"}
        if pick < 0.45:
            return {"anyOf": [self._schema(depth - 1) for _ in range(2)]}
        if pick < 0.7:
            least, first = self._random.randrange(3), [self._schema(depth - 1)] * self._random.randrange(3)
            prefix = {"prefixItems": first} if first else {}
            return {"type": "array", "minItems": least, **prefix, "items": self._schema(depth - 1)}
        properties = {name: self._schema(depth - 1) for name in ("x", "y")}
        required = [name for name in properties if self._random.random() < 0.5]
        more = {"minProperties": 1} if self._random.random() < 0.3 and not required else {}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False if self._random.random() < 0.5 else self._schema(depth - 1),
            **more,
        }

    def _in_parts(self, schema: Any) -> Any:
        """Return a schema that means the same; what some of its schemas require is in another part of an `allOf`."""
        if isinstance(schema, list):
            return [self._in_parts(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        given = {name: self._in_parts(value) for name, value in schema.items()}
        required = {name: given[name] for name in ("minItems", "required", "minProperties") if name in given}
        if "type" not in given or self._random.random() < 0.5:
            return given
        return {"allOf": [{name: value for name, value in given.items() if name not in required}, required]}

    def values(self) -> dict[str, Any]:
        """Return a value of each definition that has one, built of values of the others."""
        known: dict[str, Any] = {}
        for _ in self.names:
            for name, schema in self.schemas.items():
                for value in self._value(schema, known) if name not in known else ():
                    known[name] = value
        return known

    def _value(self, schema: Any, known: dict[str, Any]) -> list[Any]:
        """Return a value of a schema in a list; empty if there is none of the known values."""
        if schema is False:
            return []
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return [known[name]] if name in known else []
        if "anyOf" in schema:
            return next((found for part in schema["anyOf"] if (found := self._value(part, known))), [])
        if schema["type"] == "null":
            return [None]
        if schema["type"] == "array":
            parts = [*schema.get("prefixItems", ()), *[schema["items"]] * 2][: schema["minItems"]]
            found = [self._value(part, known) for part in parts]
            return [[value for (value,) in found]] if all(found) else []
        choices = [*schema["properties"].items(), ("z", schema["additionalProperties"])]
        needed = [choice for choice in choices if choice[0] in schema["required"]]
        if "minProperties" in schema:
            needed = next(([choice] for choice in choices if self._value(choice[1], known)), choices)
        members = {name: self._value(part, known) for name, part in needed}
        return [{name: value for name, (value,) in members.items()}] if all(members.values()) else []


def test_exactly_the_schemas_without_a_value_that_ends_are_refused() -> None:
    refused = 0
    for seed in range(400):
        definitions = Definitions(seed)
        found = definitions.values()
        for name, value in found.items():
            with suppress(RecursionError):  # of the validator, where a schema may refer to itself for the same value
                jsonschema.validate(value, {**definitions.document, "anyOf": [{"$ref": f"#/$defs/{name}"}]})
        is_refused = False
        try:
            normalized(definitions.document)
        except SchemaError:
            is_refused = True
        assert is_refused == (len(found) < 3), f"seed {seed}: {definitions.schemas}"
        refused += is_refused
    assert 50 < refused < 350


def test_rules_end_if_one_of_their_alternatives_does() -> None:
    needs = {
        "end": [["leaf"], ["loop"]],
        "loop": [["loop", "leaf"]],
        "user": [["end", "loop"], ["end", "end"]],
        "none": [],
        "needs none": [["none", "leaf"], ["needs none"]],
        "may need none": [["none"], ["loop"]],
    }
    assert with_an_end(needs) == {"leaf", "end", "user"}
    assert without_a_match(needs) == {"none"}
