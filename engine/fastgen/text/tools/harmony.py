"""Calls of gpt-oss: messages of Harmony whose header names a function, `to=functions.NAME`."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text import harmony
from fastgen.text.grammars.lark import quoted
from fastgen.text.harmony import Closed, MessageReader, Opened, Piece, Text
from fastgen.text.output_events import CallArguments, CallBegun, Content, OutputEvent
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments
from fastgen.text.tools.json_text import JsonReader


class Harmony(ToolFormat):
    """A call ends a generation, so there is one at most."""

    opening = harmony.CHANNEL
    marks = harmony.MARKS
    example = (
        f"{harmony.CHANNEL}commentary to={harmony.FUNCTIONS}<function name> {harmony.CONSTRAIN}json{harmony.MESSAGE}"
        "<object>"
    )
    answer_head = (harmony.CHANNEL, harmony.FINAL.channel, harmony.MESSAGE)

    def can_call(self, name: str) -> bool:
        """Return whether a header can name it."""
        return harmony.Header.parse(f"{harmony.CHANNEL} to={harmony.FUNCTIONS}{name} ").recipient == (
            f"{harmony.FUNCTIONS}{name}"
        )

    def parser(self, tools: Sequence[OfferedTool]) -> HarmonyParser:
        """Return a parser of content and calls. Unknown function names are passed on."""
        del tools
        return HarmonyParser()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`."""
        del most_calls
        bodies = [
            f"{quoted(f'commentary to={harmony.FUNCTIONS}{tool.name} ')} {spell(harmony.CONSTRAIN)} "
            f'"json" {spell(harmony.MESSAGE)} arguments_{i}'
            for i, tool in enumerate(tools)
        ]
        return f"calls: {spell(harmony.CHANNEL)} opened\nopened: {' | '.join(bodies)}\n{json_arguments(tools)}"


class HarmonyParser:
    """Turns content and calls of one generation into events. A built-in tool is called by its whole name."""

    def __init__(self) -> None:
        self._reader = MessageReader(harmony.FINAL, between=harmony.FINAL)
        self._num_calls = 0
        self._arguments: _Arguments | None = None  # of the open call

    def push(self, text: str) -> list[OutputEvent]:
        """Return the events that this text completes."""
        return [event for piece in self._reader.push(text) for event in self._events(piece)]

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events at the end of the generation."""
        return [event for piece in self._reader.finish() for event in self._events(piece)]

    def _events(self, piece: Piece) -> list[OutputEvent]:
        match piece:
            case Opened(header) if header.recipient is not None:
                index, self._arguments = self._num_calls, _Arguments()
                self._num_calls += 1
                return [CallBegun(index, header.recipient.removeprefix(harmony.FUNCTIONS))]
            case Opened(header):
                # Without a parser of reasoning, other headers are content too.
                return [] if header == harmony.FINAL else [Content(str(header))]
            case Text(text) if self._arguments is not None:
                arguments = self._arguments.push(text)
                return [CallArguments(self._num_calls - 1, arguments)] if arguments else []
            case Text(text):
                return [Content(text)]
            case Closed():
                self._arguments = None
        return []


class _Arguments:
    """The text of one call: JSON, without the text after the value, or the code of a built-in tool."""

    def __init__(self) -> None:
        self._json = JsonReader()
        self._is_json: bool | None = None  # None before the first character
        self._is_complete = False

    def push(self, text: str) -> str:
        """Return the next piece."""
        if self._is_json is None:
            text = text.lstrip()
            self._is_json = text[0] in "{[" if text else None
        if not self._is_json:
            return text
        if self._is_complete:
            return ""
        piece, rest = self._json.push(text)
        self._is_complete = rest is not None
        return piece
