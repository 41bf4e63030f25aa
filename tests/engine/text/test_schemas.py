"""JSON schemas: what is accepted is enforced exactly, and what cannot be is refused by name."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from engine.text.following import accepts, compiled, follow
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.grammars.schemas.keywords import _UNENFORCEABLE
from fastgen.text.grammars.schemas.normalize import _Normalizer, normalized, normalized_arguments
from fastgen.text.grammars.schemas.numbers import BOUNDS

_TWO_63 = 1 << 63


def of(schema: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema))


def tagged(tag: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": tag}, **others}, "required": ["kind"]}


CAT, DOG = tagged("cat", lives={"type": "integer"}), tagged("dog", name={"type": "string"})
OPTIONAL_TAGS = [{"type": "object", "properties": {"kind": {"enum": [tag]}}} for tag in ("cat", "dog")]
PYDANTIC = {
    "$defs": {"Cat": CAT, "Dog": DOG},
    "properties": {
        "pet": {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        }
    },
    "required": ["pet"],
    "type": "object",
}
MANY = {f"p{i}": {"type": "integer"} for i in range(600)}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
}

_DRAFT_3, _DRAFT_4 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4))
# What drafts 3 and 4 say otherwise than later ones, with some values that match and some that do not.
OLD_FORMS: dict[str, dict[str, tuple[Any, list[Any], list[Any]]]] = {
    _DRAFT_4: {
        "exclusive minimum": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
        "exclusive maximum": ({"type": "number", "maximum": 1, "exclusiveMaximum": True}, [0.5, -1], [1, 2]),
        "exclusive bounds without a type": ({"minimum": 3, "exclusiveMinimum": True}, [4, "x"], [3]),
        "bounds that are not exclusive": (
            {"type": "integer", "minimum": 1, "exclusiveMinimum": False, "exclusiveMaximum": False},
            [1],
            [0],
        ),
        "items in a list": (
            {"type": "array", "items": [{"type": "null"}, {"type": "integer"}]},
            [[None, 1, "x"]],
            [[1]],
        ),
        "additional items": (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}},
            [[None, 1]],
            [[None, "x"]],
        ),
        "additional items of no list": ({"type": "array", "items": {}, "additionalItems": False}, [[1, 2]], [1]),
        "id": (
            {
                "id": "http://x.org/s",
                "type": "array",
                "items": {"$ref": "http://x.org/s#/definitions/n"},
                "definitions": {"n": {"type": "null"}},
            },
            [[None]],
            [[1]],
        ),
        "id that is an anchor": ({"$ref": "#n", "definitions": {"n": {"id": "#n", "type": "null"}}}, [None], [1]),
        "property of the name id": (
            {"type": "object", "properties": {"id": {"type": "null"}}},
            [{"id": None}],
            [{"id": 1}],
        ),
        "dependencies that say nothing": ({"type": "object", "dependencies": {"a": [], "b": {}}}, [{"a": 1}], [1]),
    },
    _DRAFT_3: {
        "divisibleBy": ({"type": "integer", "divisibleBy": 3}, [0, 6], [4]),
        "divisibleBy beside bounds": ({"type": "number", "divisibleBy": 0.5, "maximum": 2}, [1.5], [1.2, 2.5]),
        "required properties": (
            {"type": "object", "properties": {"a": {"type": "null", "required": True}, "b": {"required": False}}},
            [{"a": None}, {"a": None, "b": 1}],
            [{}, {"b": 1}],
        ),
        "extends": ({"type": "integer", "extends": {"minimum": 3}}, [3], [2, "x"]),
        "extends of several": ({"extends": [{"type": "integer"}, {"maximum": 3}]}, [3], [4, "x"]),
        "disallow of nothing": ({"type": "null", "disallow": []}, [None], [1]),
    },
}

# Schemas with some values that they match and some that they do not.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pattern of a declared property": (
        {"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 3}}},
        [{"ab": 4}, {"ac": 5}, {"b": "x"}, {}],
        [{"ab": 1}, {"ab": "x"}, {"ac": 1}],
    ),
    "pattern that contradicts a declared property": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "patternProperties": {"^a": {"type": "integer"}}},
        [{}, {"ab": 1}],
        [{"a": 1}, {"a": "x"}],
    ),
    "pattern of one name": (
        {
            "type": "object",
            "required": ["a"],
            "patternProperties": {"^a$": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{"a": 1}],
        [{}, {"a": "x"}, {"b": 1}],
    ),
    "pattern of several names": (
        {
            "type": "object",
            "required": ["b.c"],
            "patternProperties": {"^(a|b\\.c)$": {"type": "null"}},
            "additionalProperties": False,
        },
        [{"b.c": None}, {"a": None, "b.c": None}],
        [{"a": None}, {"bxc": None}],
    ),
    "optional properties by the thousand": (
        {"type": "object", "properties": MANY, "additionalProperties": False},
        [{}, {"p0": 1}, {"p3": 1, "p599": 2}],
        [{"q": 1}, {"p0": "x"}],
    ),
    "64-bit integers": (
        {"type": "integer", "minimum": -_TWO_63, "maximum": _TWO_63 - 1},
        [0, -1, 10**18, -(10**18), 9 * 10**18],
        [_TWO_63, -_TWO_63 - 1, 10**19],
    ),
    "unsigned 64-bit integers": (
        {"type": "integer", "minimum": 0, "maximum": 2 * _TWO_63 - 1},
        [0, 10**18],
        [-1, 2 * _TWO_63],
    ),
    "integers of 19 digits": ({"type": "integer", "minimum": 10**18}, [10**18, 9 * 10**18], [10**18 - 1, 5]),
    "negative integers of 19 digits": ({"type": "integer", "maximum": -(10**18)}, [-(10**18)], [1 - 10**18, 0]),
    "bounds that floats round": (
        {"type": "integer", "minimum": (1 << 53) + 1},
        [(1 << 53) + 2],
        [1 << 53, (1 << 53) + 1 - 1],
    ),
    "exclusive bounds of integers": (
        {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4},
        [2, 3],
        [1, 4],
    ),
    **{
        f"draft {4 if draft == _DRAFT_4 else 3}: {name}": ({"$schema": draft, **schema}, matching, others)
        for draft, forms in OLD_FORMS.items()
        for name, (schema, matching, others) in forms.items()
    },
    "numbers between 0 and 1": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.6},
        [0.5, 0.001],
        [0, 1, -0.5],
    ),
    "numbers below 0": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.01], [0, -1]),
    "merged multiples": ({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}, [12, 0, -24], [4, 6]),
    "tags": ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cow"}, {}]),
    "tags of referenced schemas": (
        PYDANTIC,
        [{"pet": {"kind": "dog", "name": "Rex"}}],
        [{"pet": {"kind": "cat", "lives": "x"}}],
    ),
    "tags that are optional": ({"oneOf": OPTIONAL_TAGS}, [{"kind": "cat"}, {"kind": "dog"}], [{"kind": "cow"}, {}]),
    "oneOf of types": ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, [1, "x", None], [1.5, []]),
    "oneOf of constants": ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}, ["a", "b"], ["c"]),
    "oneOf beside anyOf": (
        {"oneOf": [{"const": "a"}, {"const": "b"}], "anyOf": [{"enum": ["b", "c"]}, {"type": "null"}]},
        ["b"],
        ["a", "c"],
    ),
    "classes of ECMA-262": (
        {"type": "string", "pattern": "^[[a&&b-~~]$"},
        ["[", "a", "&", "c", "~"],
        ["", "]", "A"],
    ),
    "formats that are annotations": ({"type": "string", "format": "password"}, ["x", ""], [1]),
    "uniqueItems that says nothing": ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    "unique items of at most one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    "contains that says nothing": (
        {"type": "array", "contains": {"type": "string"}, "minContains": 0},
        [[], [1]],
        [{}],
    ),
    "names that are strings": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {}],
        [{"a": "x"}],
    ),
    "names of a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "names of a pattern": ({"type": "object", "propertyNames": {"pattern": "^x-"}}, [{"x-a": 1}], [{"a": 1}]),
    "conditions without a consequence": ({"if": {"type": "string"}}, ["x", 1], []),
    "unevaluated properties of one schema": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "unknown keywords": ({"type": "string", "deprecated": True, "x-note": {"$ref": 3}, "example": 1}, ["x"], [1]),
    "configuration of the library": ({"type": "string", "x-guidance": {"lenient": True}}, ["x"], [1]),
    "definitions of any place": (
        {
            "type": "array",
            "items": {"$ref": "#/components/schemas/N"},
            "components": {"schemas": {"N": {"type": "null"}}},
        },
        [[None]],
        [[1]],
    ),
    "anchors": ({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "null"}}}, [None], [1]),
    "its own id": (
        {"$id": "https://x.org/s", "$ref": "https://x.org/s#/$defs/x", "$defs": {"x": {"type": "null"}}},
        [None],
        [1],
    ),
    "recursion": (TREE, [{}, {"next": {"next": {}}}], [{"next": 1}, {"other": {}}]),
    "keywords beside a reference": (
        {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "integer", "maximum": 5}}},
        [3, 5],
        [2, 6],
    ),
    "items of older drafts": (
        {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
        [[], [None]],
        [[1], [None, 1]],
    ),
    "constants with other keywords": (
        {"enum": [1, 5, "x", None], "type": ["integer", "null"], "minimum": 4},
        [5, None],
        [1, "x"],
    ),
    "const and enum": ({"const": "b", "enum": ["a", "b"]}, ["b"], ["a"]),
    "names beyond ASCII": (
        {
            "type": "object",
            "properties": {'é"\\\n\u2028😀': {"type": "null"}},
            "required": ['é"\\\n\u2028😀'],
            "additionalProperties": False,
        },
        [{'é"\\\n\u2028😀': None}],
        [{}],
    ),
    "boolean schemas": (
        {"type": "array", "prefixItems": [True, {"type": "null"}], "items": False},
        [[1], [1, None]],
        [[1, 2], [1, None, 3]],
    ),
    "lengths as floats": ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
    "properties that nothing matches": (
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}}},
        [{}, {"b": 1}],
        [{"a": "xx"}],
    ),
}


@pytest.mark.parametrize("case", ENFORCED)
def test_an_accepted_schema_is_enforced_exactly(case: str) -> None:
    schema, matching, others = ENFORCED[case]
    matcher = compiled(of(schema))
    for value in matching:
        assert accepts(matcher, json.dumps(value, ensure_ascii=False)), value
    for value in others:
        assert not accepts(matcher, json.dumps(value, ensure_ascii=False)), value
    draft = jsonschema.Draft4Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    reference = jsonschema.validators.validator_for(schema, draft)(schema)
    complete = 0
    for seed in range(12):
        match = follow(matcher, random.Random(seed))
        if match.is_complete and "configuration" not in case:
            reference.validate(json.loads(match.text))
            complete += 1
    assert complete or "64-bit" not in case


# Schemas that are refused, and what the message names.
REFUSED: dict[str, tuple[Any, str]] = {
    "integers beyond 64 bits": ({"type": "integer", "minimum": _TWO_63}, "64 bits"),
    "constants beyond floats": ({"properties": {"a": {"const": -_TWO_63}}}, "properties.a.const: -9223372036854775808"),
    "constants within an enum": ({"enum": [0, {"x": [1 << 60]}]}, "enum.1.x.0: "),
    "large floats in an enum": ({"type": "integer", "enum": [2, 1e300]}, "enum.1: 1e\\+300 is beyond"),
    "large multiples": ({"type": "integer", "multipleOf": 123456789}, "multipleOf: 123456789"),
    "small multiples": ({"type": "number", "multipleOf": 1e-12}, "multipleOf: 1e-12"),
    "multiples that overflow together": (
        {"allOf": [{"type": "integer", "multipleOf": 19997}, {"multipleOf": 19993}]},
        "multipleOf: .* least common multiple",
    ),
    "multiple of 0": ({"type": "integer", "multipleOf": 0}, "greater than 0"),
    "bounds that contradict": ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "no number is within"),
    "bounds of another type": ({"type": "integer", "minimum": "3"}, "minimum: must be a number"),
    "large floats": ({"type": "number", "minimum": 1e30}, "bounds of numbers"),
    "not": ({"properties": {"a": {"not": {"type": "string"}}}}, "properties.a.not: cannot be enforced"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if: cannot be enforced"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems: cannot be enforced"),
    "uniqueItems that is no boolean": ({"type": "array", "uniqueItems": "yes"}, "uniqueItems: has the wrong type"),
    "contains": ({"type": "array", "contains": {"type": "string"}}, "contains: cannot be enforced"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired: cannot be enforced"),
    "unevaluatedProperties": (
        {"allOf": [{}], "unevaluatedProperties": False},
        "unevaluatedProperties: cannot be enforced",
    ),
    "propertyNames": (
        {"propertyNames": {"maxLength": 3}, "properties": {"a": {}}},
        "propertyNames: cannot be enforced",
    ),
    "minProperties": ({"type": "object", "minProperties": 2}, "minProperties: more than 1"),
    "oneOf": ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "items.oneOf: cannot be enforced"),
    "oneOf of equal tags": ({"oneOf": [CAT, CAT]}, "oneOf: cannot be enforced, because a value may match two"),
    "oneOf of many": (
        {"items": {"oneOf": [{"const": number} for number in range(257)]}},
        "items.oneOf: has 257 schemas; at most 256 are compared",
    ),
    "lookahead": ({"type": "string", "pattern": "^(?=.*x)"}, "pattern: lookaround"),
    "finite pattern": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^[ab]$": {}}, "additionalProperties": False},
        "patternProperties.* matches 'a'",
    ),
    "reference to another document": ({"$ref": "https://example.org/x"}, "example.org"),
    "reference to nothing": ({"$ref": "#/$defs/x"}, "refers to nothing"),
    "reference to itself": (
        {
            "type": "array",
            "prefixItems": [{}],
            "items": {"$ref": "#/$defs/a"},
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
        },
        "refers to itself",
    ),
    "unknown type": ({"type": "strin"}, "type: 'strin' is not one of"),
    "type of draft 3 that matches anything": ({"type": "any"}, "type: 'any' is not one of"),
    "type of draft 3 that is a schema": ({"type": ["string", {"type": "integer"}]}, "type: must be the name"),
    "disallow": ({"properties": {"a": {"disallow": "string"}}}, "properties.a.disallow: cannot be enforced"),
    "exclusive minimum without a minimum": (
        {"properties": {"a": {"type": "integer", "exclusiveMinimum": True}}},
        "properties.a.exclusiveMinimum: true applies to a minimum",
    ),
    "exclusive maximum without a maximum": (
        {"minimum": 1, "exclusiveMaximum": True},
        "exclusiveMaximum: true applies to",
    ),
    "exclusive bound of a third kind": (
        {"type": "integer", "exclusiveMinimum": "yes"},
        "exclusiveMinimum: must be a number",
    ),
    "required outside of properties": ({"type": "string", "required": True}, "required: must be a list of names"),
    "required by one name": ({"type": "object", "required": "a"}, "required: must be a list of names"),
    "divisible by 0": ({"type": "integer", "divisibleBy": 0}, "multipleOf: must be greater than 0"),
    "dependencies of names": ({"dependencies": {"a": ["b"]}}, "dependencies: cannot be enforced"),
    "dependencies of schemas": ({"dependencies": {"a": {"required": ["b"]}}}, "dependencies: cannot be enforced"),
    "dependencies of draft 3": ({"dependencies": {"a": "b"}}, "dependencies: cannot be enforced"),
    "references below another id": (
        {"properties": {"a": {"$id": "https://x.org/a", "$ref": "#/$defs/n", "$defs": {"n": {}}}}, "$defs": {"n": {}}},
        "properties.a.\\$id: references below an id",
    ),
    "references below another id of draft 4": (
        {"properties": {"a": {"id": "a.json", "items": {"$ref": "#"}}}},
        "properties.a.id: references below an id",
    ),
    "nesting": (json.loads('{"items":' * 60 + "{}" + "}" * 60), "nested more than"),
    "empty enum": ({"enum": []}, "enum: .* not empty"),
    "wrong type of a keyword": ({"properties": []}, "properties: must be an object"),
    "negative length": ({"type": "string", "minLength": -1}, "minLength: must be an integer, at least 0"),
    "array of arguments": ({"type": ["array", "null"]}, 'type: must be "object"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_by_the_name_of_the_keyword(case: str) -> None:
    schema, message = REFUSED[case]
    with pytest.raises(SchemaError, match=message):
        normalized_arguments(schema) if case == "array of arguments" else normalized(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "array", "items": False, "minItems": 1},
        {"const": "a", "minLength": 3},
        {"enum": [1, 2], "type": "string"},
        {"not": {}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "string", "pattern": "^a$", "format": "date"},
        {"type": "string", "pattern": "a^b"},
    ],
    ids=json.dumps,
)
def test_a_schema_that_nothing_matches_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        compiled(of(schema))


def test_empty_classes_of_ecma_262_are_any_character_and_none() -> None:
    assert normalized({"pattern": "^[^]\\[x]$"}) == {"pattern": "^(?s:.)\\[x]$"}
    matcher = compiled(of({"type": "string", "pattern": "^([^]x|[])$"}))
    assert accepts(matcher, '"[x"')
    assert not accepts(matcher, '""')


_ODD: list[Any] = [None, True, 0, -1, 1.5, "x", "", [], [1], ["a"], [{}], {}, {"a": 1}, {"a": [1]}, [[]], {"$ref": 3}]
_KEYWORDS = [
    *_Normalizer(True)._handlers,
    *BOUNDS,
    *_UNENFORCEABLE,
    "format",
    "additionalItems",
    "$defs",
    "$id",
    "$anchor",
]
_BASES: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "required": ["a"]},
    {"oneOf": [{"type": "integer"}, {"properties": {"k": {"const": 1}}}], "items": [{}], "maxItems": "x"},
    {"propertyNames": {"enum": ["a"]}, "$ref": "#", "contains": {}},
    {"$ref": "#q"},
]


@pytest.mark.parametrize("keyword", sorted(_KEYWORDS))
def test_a_keyword_of_any_type_is_accepted_or_refused(keyword: str) -> None:
    for value in _ODD:
        for base in _BASES:
            for normalize in (normalized, normalized_arguments):
                with suppress(SchemaError):
                    normalize({**base, keyword: value})
