"""Tokens of Lark's syntax as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<space> (?:\#|//)[^\n]* | [ \t]+ | (?:\r?\n)+[ \t]*(?=\|) )   # an alternative continues the line before
    | (?P<newline> (?:\r?\n)+[ \t]* )
    | (?P<string> "(?:\\.|[^"\\])*"i? )
    | (?P<regex> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<name> [!?_]*[A-Za-z][\w-]* )
    | (?P<data> %(?:json|regex|llguidance) )                             # JSON follows
    | (?P<other> %\w+ | <[^<>\s]+> | @[\w-]+ | 0x[\da-fA-F]+ | \d+ | :: | \.\. | -> | . )""",
    re.VERBOSE | re.DOTALL,
)


def tokens(text: str) -> Iterator[tuple[str, str]]:
    """Split a valid grammar into pairs of a kind and a text, which together are the grammar.

    Raises:
        ValueError: if it is not valid in a way that shows here.
    """
    place = 0
    while match := _TOKEN.match(text, place):
        kind, place = str(match.lastgroup), match.end()
        if kind == "data":
            start = len(text) - len(text[place:].lstrip())
            place = json.JSONDecoder().raw_decode(text, start)[1]
        yield kind, text[match.start() : place]
