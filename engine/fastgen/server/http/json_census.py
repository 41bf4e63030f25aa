"""Counts the values of a JSON text while it arrives, and names the field that has most of them.

What a body costs the server depends less on its bytes than on its values: sixteen megabytes hold one string, or five
million objects, which take seconds to parse, validate and render. Counting takes well under a millisecond for each
piece that a connection receives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# Objects, lists and strings of a body, keys included. A message takes five, a property of a JSON schema about six.
MOST_NODES = 1 << 16
# Other items of lists: token ids, most often. They cost a hundredth of the others.
MOST_ITEMS = 1 << 20

_KEY = re.compile(r'[\s{,]*"((?:[^"\\]++|\\.)*+)"\s*+:\s*+', re.DOTALL)
_LONGEST_NAME = 100
_PIECE = 1 << 16


class JSONCensus:
    """Counts the values of a JSON text that is fed piece by piece. Text that is not JSON does no harm.

    Attributes:
        num_nodes: objects, lists and strings, keys included.
        num_commas: commas outside strings; a list has one less than it has items.
    """

    __slots__ = ("_begun_escape", "_in_string", "num_commas", "num_nodes")

    def __init__(self) -> None:
        self.num_nodes = 0
        self.num_commas = 0
        self._in_string = False
        self._begun_escape = b""

    @property
    def is_exceeded(self) -> bool:
        """Return whether the text has more values than a body may have."""
        return self.num_nodes > MOST_NODES or self.num_commas > MOST_NODES + MOST_ITEMS

    def feed(self, piece: bytes) -> None:
        """Count the values of the next piece."""
        if self._begun_escape:
            piece, self._begun_escape = self._begun_escape + piece, b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._begun_escape = piece[:-1], b"\\"
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        num_quotes = len(parts) - 1
        outside = b"".join(parts[self._in_string :: 2])
        self.num_nodes += (num_quotes + (not self._in_string)) // 2 + outside.count(b"{") + outside.count(b"[")
        self.num_commas += outside.count(b",")
        self._in_string ^= bool(num_quotes % 2)


def check_nested(texts: Iterable[str]) -> None:
    """Raise ValueError if JSON texts in strings of a body have more than `MOST_NODES` values of any kind together.

    Parsing them holds the interpreter's lock.
    """
    num_values = 0
    for text in texts:
        census = JSONCensus()
        for start in range(0, len(text), _PIECE):
            census.feed(text[start : start + _PIECE].encode(errors="replace"))
            if num_values + census.num_nodes + census.num_commas > MOST_NODES:
                raise ValueError(f"has JSON in strings with more than {MOST_NODES} values; shorten it")
        num_values += census.num_nodes + census.num_commas


def _ignored(_number: str) -> None:
    """Replace a number. The decoder is written in C: only while it calls Python code can other threads run."""


def largest_field(text: bytes | bytearray) -> str | None:
    """Return the field of a JSON object, complete or not, that has most values; None if there is none."""
    characters = text.decode(errors="replace")
    decoder = json.JSONDecoder(parse_int=_ignored, parse_float=_ignored)
    sizes, position = dict[str, int](), 0
    while (key := _KEY.match(characters, position)) is not None:
        try:
            _, position = decoder.raw_decode(characters, key.end())
        except (ValueError, RecursionError):  # the field has not ended, or is not JSON
            position = len(characters)
        census = JSONCensus()
        census.feed(characters[key.end() : position].encode(errors="replace"))
        sizes[key[1][:_LONGEST_NAME]] = census.num_nodes + census.num_commas
    return max(sizes, key=sizes.__getitem__, default=None)
