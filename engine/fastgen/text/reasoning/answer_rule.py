"""The rule of an answer in the grammar of a whole generation."""

from __future__ import annotations

import json

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.lark import json_body


def answer_rule(answer: Grammar | None) -> str:
    """Return the rule `rest` of text that matches `answer`; of any text without one."""
    if answer is None:
        return "rest: /(.|\\n)*/\n"
    if answer.kind == "lark":
        return f"rest: %lark {{\n{answer.text}\n}}\n"
    if answer.kind == "regex":
        pattern = answer.text.replace("\n", "\\n")
        return f"rest: /{_slashed(pattern)}/\n"
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]}
    return f"rest: {json_body(schema)}\n"


def _slashed(pattern: str) -> str:
    """Escape the slashes of a regular expression that are not escaped yet."""
    pieces, escaped = [], False
    for character in pattern:
        pieces.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(pieces)
