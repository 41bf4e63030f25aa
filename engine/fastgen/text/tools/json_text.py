"""JSON as models write it, which is not always quite JSON: where it ends, and how it becomes what a client can read."""

from __future__ import annotations

import json
from math import isfinite
from typing import TypeGuard


class JsonSpan:
    """Finds where a JSON object or array ends, whatever is in it."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """How much of `text` still belongs to it, where it ends in there; else None, and all of it does."""
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
    """Writes JSON that `loaded` takes so that every reader of JSON takes it, piece by piece.

    Models write line breaks and tabs into strings as they are, where JSON must have them escaped. So must half a
    surrogate pair be, which is no character that could be sent.
    """

    __slots__ = ("_escaped", "_in_string")

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> str:
        """The next piece, as it must be written."""
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
    """The JSON in `text`, or None where it is none; control characters may stand in its strings as they are."""
    try:
        return json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(number: str) -> float:
    """Python reads NaN and Infinity, and takes what is too large for infinite; JSON knows neither."""
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{number} is no number of JSON's")
    return value


def dumped(value: object) -> str:
    """A value that `loaded` gave, as JSON that every reader takes."""
    return JsonRepair().push(json.dumps(value, ensure_ascii=False))


def is_json_object(text: str) -> bool:
    """Is `text` a JSON object, as `loaded` takes it?"""
    return isinstance(loaded(text), dict)


def is_name(value: object) -> TypeGuard[str]:
    """Is `value` a text that can be sent as it is? JSON can spell half a surrogate pair, which is none."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
