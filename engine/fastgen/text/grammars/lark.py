"""Parts from which the Lark grammars of tools and reasoning are composed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.compiler import json_part
from fastgen.text.grammars.limits import GRAMMARS_KEPT, MOST_GRAMMAR_BYTES
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.grammars.schemas.normalize import normalized, normalized_arguments
from fastgen.text.tokenizer import Tokenizer


def escaped(text: str) -> str:
    """Escape text for a regular expression of a Lark grammar, which is between slashes."""
    return "".join(f"\\{c}" if c in ".|()[]{}*+?^$/\\" else c for c in text)


def quoted(text: str) -> str:
    """Return `text` as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def spelled_mark(tokenizer: Tokenizer, mark: str) -> str:
    """Spell a mark for a Lark grammar: as a token if the vocabulary has one for it, otherwise as text."""
    return next((f"<[{token_id}]>" for token_id in tokenizer.added_ids_of([mark])), quoted(mark))


def json_body(schema: Mapping[str, Any]) -> str:
    """Return the body of a Lark rule: JSON that matches a schema.

    Raises:
        SchemaError: if the schema is invalid or cannot be enforced.
    """
    return _json_part(_short(json.dumps(schema)))


def arguments_body(schema: Mapping[str, Any]) -> str:
    """Return the body of a Lark rule: an object that matches the schema of a function's parameters.

    Raises:
        SchemaError: if the schema is invalid, cannot be enforced or does not match objects.
    """
    return _json_part(_short(json.dumps(schema)), are_arguments=True)


def arguments_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a function's arguments.

    Raises:
        SchemaError: as `arguments_body`.
    """
    return Grammar(kind="lark", text=f"start: {arguments_body(schema)}\n")


def _short(text: str) -> str:
    if len(text) > MOST_GRAMMAR_BYTES:
        raise SchemaError(f"it has {len(text)} characters, and at most {MOST_GRAMMAR_BYTES} are accepted; shorten it")
    return text


# The requests of one application have the same tools.
@lru_cache(4 * GRAMMARS_KEPT)
def _json_part(text: str, *, are_arguments: bool = False) -> str:
    schema = json.loads(text)
    return json_part(normalized_arguments(schema) if are_arguments else normalized(schema))
