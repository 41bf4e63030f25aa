"""Streaming parser of one call: a JSON object with a function's name and arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastgen.text.output_events import CallArguments, CallBegun, Content, OutputEvent
from fastgen.text.spelled_marks import unguarded
from fastgen.text.tools.json_text import JsonReader, dumped, is_name, loaded, strict

# The usual spelling; any other is buffered completely before it is judged.
_HEADER = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
    r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_LONGEST_HEADER = 1024
_FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"')
_KEYS = frozenset({"name", "type", "id", "function", "arguments", "parameters"})


class CallReader:
    """Parses `{"name": ..., "arguments": {...}}` and passes the arguments on as they arrive.

    An object whose name has been read is a call, whatever follows: the name has been sent to streaming clients. Its
    arguments may not be valid JSON then.

    Attributes:
        done: whether the object is complete, or known not to be a call.
        called: whether it is a call, as far as known.

    Args:
        index: number of the call.
        prefix: text before the object, which becomes content with it if it is not a call.
        names: function names that make a call; None for any name.
        marks: texts that end the object if brackets are missing.
    """

    def __init__(self, index: int, prefix: str, names: frozenset[str] | None, marks: Sequence[str]) -> None:
        self.done = False
        self.called = False
        self._index = index
        self._prefix = prefix
        self._names = names
        self._raw: list[str] = []
        self._repaired: list[str] = []
        self._head = ""  # beginning of the repaired text, up to `_LONGEST_HEADER`
        self._object = JsonReader(marks)
        self._arguments: JsonReader | None = None

    def push(self, text: str) -> tuple[list[OutputEvent], str]:
        """Return the events of this text, and the text after the object."""
        piece, rest = self._object.push(text)
        events: list[OutputEvent] = []
        if not self.called:
            self._raw.append(text)
            if rest:  # a mark may have begun in an earlier text
                self._raw = [self._text[: -len(rest)]]
            self._repaired.append(piece)
            piece = self._begin(events)
        if self.done:  # not a call, as its beginning shows
            return events, self._over(events) + (rest or "")
        if self._arguments is not None:
            arguments, after = self._arguments.push(piece)
            if after is not None:
                self._arguments = None
            if arguments:
                events.append(CallArguments(self._index, arguments))
        if rest is not None:
            self._close(events)
        return events, rest or ""

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events if the generation ends inside the object; a call keeps partial arguments."""
        self.done = True
        return [] if self.called else [Content(self._prefix + self._text)]

    @property
    def _text(self) -> str:
        return "".join(self._raw)

    def _begin(self, events: list[OutputEvent]) -> str:
        """Find the name; return the arguments so far."""
        if len(self._head) >= _LONGEST_HEADER:  # it has been judged
            return ""
        self._head = (self._head + self._repaired[-1])[:_LONGEST_HEADER]
        first, header = _FIRST_KEY.match(self._head), _HEADER.match(self._head)
        name = loaded(unguarded(header.group(1))) if header else None
        unknown = is_name(name) and self._names is not None and name not in self._names
        if (first and first.group(1) not in _KEYS) or unknown:
            self.done = True
        elif header and is_name(name):
            self.called = True
            self._arguments = JsonReader()
            events.append(CallBegun(self._index, name))
            return "".join(self._repaired)[header.end() :]
        return ""

    def _over(self, events: list[OutputEvent]) -> str:
        """Emit text that cannot be a call as content; the text after the decisive part is parsed again."""
        raw = self._text
        first = _FIRST_KEY.match(raw)
        assert first is not None
        events.append(Content(self._prefix + raw[: first.end()]))
        return raw[first.end() :]

    def _close(self, events: list[OutputEvent]) -> None:
        """Decide at the end of the object whether it is a call, unless its name has decided that."""
        self.done = True
        if self.called:
            return
        call = _call_in(loaded(unguarded("".join(self._repaired))))
        if call is None or (self._names is not None and call[0] not in self._names):
            events.append(Content(self._prefix + self._text))
            return
        self.called = True
        events += [CallBegun(self._index, call[0]), CallArguments(self._index, call[1])]


def _call_in(value: object) -> tuple[str, str] | None:
    """Return name and arguments of an unusual call: reordered, as text, missing, or inside `function`.

    None if the value is not a call.
    """
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    call: dict[str, object] = inner if isinstance(inner, dict) else value
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not is_name(name):
        return None
    if isinstance(arguments, str) and isinstance(loaded(arguments), dict):
        return name, strict(arguments)
    if isinstance(arguments, str) and not arguments.strip():
        return name, "{}"
    if arguments is None or isinstance(arguments, dict):
        return name, dumped(arguments or {})
    return None
