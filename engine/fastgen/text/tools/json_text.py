"""Find the end of near-JSON written by models, and repair it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite
from typing import TypeGuard

_CLOSING = {"{": "}", "[": "]"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPENING = {closing: opening for opening, closing in _CLOSING.items()}


class JsonReader:
    """Follows a JSON object or array through pieces of text, and rewrites what `loaded` accepts as strict JSON.

    Models write unescaped line breaks and tabs into strings. Missing closing brackets are added where an outer bracket
    is closed, and before one of `marks`: texts outside of strings that end the value. Their first characters differ and
    occur only once in them.
    """

    __slots__ = ("_escaped", "_held", "_in_string", "_marks", "_num_open", "_open")

    def __init__(self, marks: Sequence[str] = ()) -> None:
        self._marks = {mark[0]: mark for mark in marks}
        self._held = ""  # characters outside of strings that begin a mark
        self._open: list[str] = []
        self._num_open = dict.fromkeys(_CLOSING, 0)
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the next piece as strict JSON, and the text after the value; None until that has ended."""
        pieces: list[str] = []
        for place, character in enumerate(text):
            if self._in_string:
                pieces.append(self._in_text(character))
                continue
            held, self._held = self._held, ""
            mark = self._marks.get((held or character)[0], "")
            if mark.startswith(held + character):
                self._held = held + character
                if self._held == mark:
                    return "".join([*pieces, self._all_closed()]), mark + text[place + 1 :]
                continue
            if held and character in self._marks:  # of another mark
                self._held, character = character, ""
            for outside in held + character:
                piece, end = self._outside(outside)
                pieces.append(piece)
                if end is not None:  # only the last character may end the value: no other one of a mark is a bracket
                    return "".join(pieces), text[place + end :]
        return "".join(pieces), None

    def _in_text(self, character: str) -> str:
        """Return a character of a string, escaped if JSON requires it."""
        if self._escaped:
            self._escaped = False
            return character
        self._escaped = character == "\\"
        self._in_string = character != '"'
        return json.dumps(character)[1:-1] if character < " " else character

    def _outside(self, character: str) -> tuple[str, int | None]:
        """Return a character outside of strings, with the brackets missing before it.

        Also return where the value ends: before the character (0), after it (1), or not yet (None).
        """
        self._in_string = character == '"'
        if character in _CLOSING:
            self._open.append(character)
            self._num_open[character] += 1
        opening = _OPENING.get(character)
        if opening is None:
            return character, None
        if not self._num_open[opening]:  # it closes what is around the value
            return self._all_closed(), 0
        missing = ""
        while (last := self._pop()) != opening:
            missing += _CLOSING[last]
        return missing + character, None if self._open else 1

    def _all_closed(self) -> str:
        return "".join([_CLOSING[self._pop()] for _ in range(len(self._open))])

    def _pop(self) -> str:
        last = self._open.pop()
        self._num_open[last] -= 1
        return last


def strict(text: str) -> str:
    """Rewrite a JSON value that `loaded` accepts as strict JSON.

    A lone surrogate is escaped, because it cannot be encoded as UTF-8.
    """
    piece, rest = JsonReader().push(text)
    value = piece + (rest or "")  # white space may follow
    return _SURROGATE.sub(lambda found: json.dumps(found[0])[1:-1], value)


def loaded(text: str) -> object:
    """Parse the JSON in `text`, allowing control characters in strings; None for null, and if it is not JSON."""
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
    return isinstance(value, str) and _SURROGATE.search(value) is None
