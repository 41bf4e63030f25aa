"""Fields that give the structure of the output, converted to grammars.

They are OpenAI's response_format, vLLM's guided_*, structured_outputs and allowed_token_ids, and SGLang's json_schema,
regex and ebnf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import BaseModel, PlainValidator, WithJsonSchema

from fastgen.core.sampling_params import Grammar
from fastgen.server.http.json_census import check_nested
from fastgen.server.openai.fields.types import field_error, optional

# Converting longer EBNF to Lark syntax would block the event loop for longer than a step.
_MAX_EBNF_LENGTH = 1 << 14
# Lark syntax has one of these; EBNF does not, although it may have a rule named start.
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)


def _schema_grammar(schema: Any) -> Grammar:
    """Return the grammar of a JSON schema, given as an object or as JSON text."""
    if isinstance(schema, str):
        check_nested([schema])
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON schema; this string is not valid JSON") from None
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, which is a JSON object")
    return Grammar(kind="json_schema", text=json.dumps(schema))


def _choice_grammar(choices: Any) -> Grammar:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("must be a list of non-empty strings")
    return Grammar(kind="regex", text="|".join(f"(?:{re.escape(choice)})" for choice in choices))


def _regex_grammar(value: Any) -> Grammar:
    return Grammar(kind="regex", text=_non_empty_string(value))


def _text_grammar(value: Any) -> Grammar:
    """Return a grammar in Lark syntax; convert llama.cpp's EBNF (GBNF)."""
    text = _non_empty_string(value)
    if "::=" not in text or _LARK.search(text):
        return Grammar(kind="lark", text=text)
    if len(text) > _MAX_EBNF_LENGTH:
        raise ValueError(f"is EBNF of more than {_MAX_EBNF_LENGTH} characters; use Lark syntax, or shorten it")
    try:
        return Grammar(kind="lark", text=gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("is nested too deeply; simplify it") from None
    except Exception as error:  # the library raises plain Exceptions for missing rules
        raise ValueError(f"is not valid EBNF: {error}") from None


def _token_grammar(tokens: Any) -> Grammar | None:
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise ValueError("must be a list of token ids")
    return Grammar(kind="tokens", text=",".join(map(str, sorted(set(tokens))))) if tokens else None


def _non_empty_string(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return value


def _object_grammar(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return Grammar(kind="json_object") if value else None


# vLLM's other keys of `structured_outputs`. Except structural_tag, which may only be null, they configure its backends,
# not the structure.
_IGNORED_KEYS = frozenset({"structural_tag", "disable_fallback", "disable_any_whitespace", "backend"})

_KINDS: dict[str, Callable[[Any], Grammar | None]] = {
    "json": _schema_grammar,
    "json_object": _object_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _text_grammar,
}


def _response_format(value: Any) -> Grammar | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema} if schema is not None:  # as in llama.cpp
            return _schema_grammar(schema)
        case {"type": "json_object"}:
            return Grammar(kind="json_object")
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _schema_grammar(schema)
        case {"type": "json_schema"}:
            raise ValueError('json_schema must have a "schema"')
    raise ValueError('must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": ...}')


def _structured_outputs(value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with one of {', '.join(_KINDS)}")
    if value.get("structural_tag") is not None:
        raise ValueError("structural_tag is not supported; use json, regex, choice or grammar")
    unknown = sorted(map(str, set(value) - set(_KINDS) - _IGNORED_KEYS))
    if unknown or not any(value.get(kind) is not None for kind in _KINDS):
        wrong = f"; {unknown[0][:40]!r} is not one of them" if unknown else ""
        raise ValueError(f"must have one of {', '.join(_KINDS)}{wrong}")
    found = [_of_kind(kind, given) for kind, given in value.items() if kind in _KINDS and given is not None]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise ValueError("gives two structures; keep one of them")
    return next(iter(grammars), None)


def _of_kind(kind: str, given: Any) -> Grammar | None:
    try:
        return _KINDS[kind](given)
    except ValueError as error:
        raise ValueError(f"{kind} {error}") from None


def _field(make: Callable[[Any], Grammar | None], *schemas: dict[str, Any], description: str | None = None) -> Any:
    """Return a field that `make` validates to a grammar; `schemas` are its alternatives in the OpenAPI document."""

    def validate(value: Any) -> Grammar | None:
        return None if value is None else make(value)

    schema = WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})
    return optional(PlainValidator(validate), schema, description=description)


_OBJECT, _TEXT = {"type": "object"}, {"type": "string", "minLength": 1}
_TYPED = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
}


class StructureFields(BaseModel):
    """Fields that set the structure of the output. A request may set only one. Each is a Grammar or None."""

    response_format: Any = _field(_response_format, _TYPED)
    guided_json: Any = _field(_schema_grammar, _OBJECT, _TEXT)
    guided_regex: Any = _field(_regex_grammar, _TEXT)
    guided_choice: Any = _field(_choice_grammar, {"type": "array", "items": _TEXT, "minItems": 1})
    guided_grammar: Any = _field(_text_grammar, _TEXT)
    structured_outputs: Any = _field(_structured_outputs, _OBJECT)
    json_schema: Any = _field(_schema_grammar, _OBJECT, _TEXT, description="the same as `guided_json`")
    regex: Any = _field(_regex_grammar, _TEXT, description="the same as `guided_regex`")
    ebnf: Any = _field(_text_grammar, _TEXT, description="the same as `guided_grammar`")
    allowed_token_ids: Any = _field(
        _token_grammar,
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        description="not with a structure or tools; an end token must be listed to be generated",
    )

    def structure(self) -> tuple[Grammar, str] | None:
        """Return the grammar that the output must match and the field that it came from, if any.

        Raises:
            RequestError: if two fields give a structure.
        """
        given = [name for name in StructureFields.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise field_error(given[1], f"{given[0]} already gives a structure; keep one of them")
        return (getattr(self, given[0]), given[0]) if given else None
