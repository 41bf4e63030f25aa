"""What an answer must look like: OpenAI's response_format and vLLM's spellings of it, as grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any

from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import PlainValidator, WithJsonSchema

from fastgen.core.request import Grammar

# Turning more of it into Lark's syntax would hold up the event loop for longer than a pass takes.
_LONGEST_EBNF = 1 << 14
# What a grammar in Lark's syntax has and one in EBNF has not, which may have a rule of this name.
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
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


def _regex_grammar(value: Any) -> Grammar:
    return Grammar(kind="regex", text=_written(value))


def _written_grammar(value: Any) -> Grammar:
    """A grammar in Lark's syntax, or in the EBNF of llama.cpp, which becomes one."""
    text = _written(value)
    if "::=" not in text or _LARK.search(text):
        return Grammar(kind="lark", text=text)
    if len(text) > _LONGEST_EBNF:
        raise ValueError(f"is EBNF of more than {_LONGEST_EBNF} characters; write it in Lark's syntax, or shorten it")
    try:
        return Grammar(kind="lark", text=gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except Exception as error:  # the library's own, and plain ones for rules that are missing
        raise ValueError(f"is no EBNF: {error}") from None


def _written(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text, and not an empty one")
    return value


def _object_grammar(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return Grammar(kind="json_object") if value else None


# What else vLLM's users may say in `structured_outputs`: how to go about it, not what the answer is.
_REMARKS = frozenset({"structural_tag", "disable_fallback", "disable_any_whitespace", "backend"})

_KINDS: dict[str, Callable[[Any], Grammar | None]] = {
    "json": schema_grammar,
    "json_object": _object_grammar,
    "regex": _regex_grammar,
    "choice": choice_grammar,
    "grammar": _written_grammar,
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
    unknown = sorted(map(str, set(value) - set(_KINDS) - _REMARKS))
    if unknown or not any(value.get(kind) is not None for kind in _KINDS):
        wrong = f", and {unknown[0][:40]!r} is none of them" if unknown else ""
        raise ValueError(f"must have one of {', '.join(_KINDS)}{wrong}")
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
