"""What an answer must look like: OpenAI's response_format and vLLM's spellings of it, as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from fastgen.core.request import Grammar

_META = frozenset(r"\.+*?()|[]{}^$#&-~/")


def schema_grammar(schema: Any) -> Grammar:
    """The grammar of JSON that a schema allows; the schema may be spelled as a text.

    Raises:
        ValueError: when it is no schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema, and this text is not JSON") from None
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, which is an object")
    return Grammar(kind="json_schema", text=json.dumps(schema))


def choice_grammar(choices: Any) -> Grammar:
    """The grammar of one of these texts."""
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise ValueError("must be a list of texts, none of them empty")
    return Grammar(kind="regex", text="|".join(f"(?:{_literal(choice)})" for choice in choices))


def _literal(text: str) -> str:
    return "".join(f"\\{character}" if character in _META else character for character in text)


def _written(kind: Any) -> Callable[[Any], Grammar]:
    def grammar(value: Any) -> Grammar:
        if not isinstance(value, str) or not value:
            raise ValueError("must be a text, and not an empty one")
        return Grammar(kind=kind, text=value)

    return grammar


def _object_grammar(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return Grammar(kind="json_object") if value else None


_KINDS: dict[str, Callable[[Any], Grammar | None]] = {
    "json": schema_grammar,
    "json_object": _object_grammar,
    "regex": _written("regex"),
    "choice": choice_grammar,
    "grammar": _written("lark"),
}


def _response_format(value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise ValueError('json_schema must hold a "schema"')
        return schema_grammar(described["schema"])
    raise ValueError('must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}')


def _structured_outputs(value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with one of {', '.join(_KINDS)}")
    if value.get("structural_tag") is not None:
        raise ValueError("structural_tag is not served: use json, regex, choice or grammar")
    found = [_KINDS[kind](given) for kind, given in value.items() if kind in _KINDS and given is not None]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise ValueError("asks for two structures at once; keep one")
    return grammars[0] if grammars else None


def _field(make: Callable[[Any], Grammar | None], *schemas: dict[str, Any]) -> Any:
    def validate(value: Any) -> Grammar | None:
        return None if value is None else make(value)

    return Annotated[Any, PlainValidator(validate), WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})]


_OBJECT, _TEXT = {"type": "object"}, {"type": "string", "minLength": 1}
_TYPED = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
}

# Each of these fields holds the grammar that was asked for, or None.
ResponseFormat = _field(_response_format, _TYPED)
GuidedJson = _field(_KINDS["json"], _OBJECT, _TEXT)
GuidedRegex = _field(_KINDS["regex"], _TEXT)
GuidedChoice = _field(_KINDS["choice"], {"type": "array", "items": _TEXT, "minItems": 1})
GuidedGrammar = _field(_KINDS["grammar"], _TEXT)
StructuredOutputs = _field(_structured_outputs, _OBJECT)
