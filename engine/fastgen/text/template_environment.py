"""The Jinja environment of chat templates, which matches transformers' `apply_chat_template`.

It has the same white space rules, `raise_exception`, `strftime_now`, `tojson`, loop controls, and `generation` blocks,
which only matter in training.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastgen.text.control_tokens import MARK

# Without the mark of control tokens, which stays as it is.
_NOT_ASCII = re.compile(rf"[^\0-\x7f{MARK}]+")


def environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _GenerationBlocks(Extension):
    """Jinja tag `{% generation %}...{% endgeneration %}`, which marks training text: renders its body."""

    tags = {"generation"}  # noqa: RUF012  (name and type required by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which does not belong in a prompt.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
