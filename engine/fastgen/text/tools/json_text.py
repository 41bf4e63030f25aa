"""Find the end of near-JSON written by models, and repair it."""

from __future__ import annotations

import json
from math import isfinite
from typing import TypeGuard


class JsonSpan:
    """Finds the end of a JSON object or array."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Return how many characters of `text` belong to it if it ends there; otherwise None."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class JsonRepair:
    """Rewrites JSON that `loaded` accepts into strict JSON, incrementally.

    Models write unescaped line breaks and tabs into strings. A lone surrogate is escaped as well, because it cannot be
    encoded as UTF-8.
    """

    __slots__ = ("_escaped", "_in_string")

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> str:
        """Return the next piece as strict JSON."""
        return "".join(map(self._written, text))

    def _written(self, character: str) -> str:
        if not self._in_string:
            self._in_string = character == '"'
            return character
        if self._escaped:
            self._escaped = False
            return character
        self._escaped = character == "\\"
        self._in_string = character != '"'
        must_be_escaped = character < " " or "\ud800" <= character <= "\udfff"
        return json.dumps(character)[1:-1] if must_be_escaped else character


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
    return JsonRepair().push(json.dumps(value, ensure_ascii=False))


def is_name(value: object) -> TypeGuard[str]:
    """Return whether `value` is valid text; JSON can contain a lone surrogate, which is not."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
