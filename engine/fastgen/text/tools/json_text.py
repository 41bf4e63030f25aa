"""Find the end of near-JSON written by models, and repair it."""

from __future__ import annotations

import json
from math import isfinite
from typing import TypeGuard


class JsonReader:
    """Follows a JSON object or array through pieces of text, and rewrites what `loaded` accepts as strict JSON.

    Models write unescaped line breaks and tabs into strings. A lone surrogate is escaped as well, because it cannot be
    encoded as UTF-8.
    """

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str, int | None]:
        """Return the next piece as strict JSON; and, if the value ends in `text`, how many characters belong to it."""
        pieces = []
        for place, character in enumerate(text):
            if not self._in_string:
                pieces.append(character)
                self._in_string = character == '"'
                if character in "{[":
                    self._depth += 1
                elif character in "}]":
                    self._depth -= 1
                    if self._depth <= 0:
                        return "".join(pieces), place + 1
            elif self._escaped:
                pieces.append(character)
                self._escaped = False
            else:
                self._escaped = character == "\\"
                self._in_string = character != '"'
                must_be_escaped = character < " " or "\ud800" <= character <= "\udfff"
                pieces.append(json.dumps(character)[1:-1] if must_be_escaped else character)
        return "".join(pieces), None


def strict(text: str) -> str:
    """Rewrite a JSON value that `loaded` accepts as strict JSON."""
    piece, end = JsonReader().push(text)
    return piece if end is None else piece + text[end:]  # white space may follow


def loaded(text: str) -> object:
    """Parse the JSON in `text`, allowing control characters in strings; None if it is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    """Reject NaN and Infinity, which Python accepts and JSON does not have."""
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


def dumped(value: object) -> str:
    """Serialize a value from `loaded` as strict JSON."""
    return strict(json.dumps(value, ensure_ascii=False))


def is_name(value: object) -> TypeGuard[str]:
    """Return whether `value` is valid text; JSON can contain a lone surrogate, which is not."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
