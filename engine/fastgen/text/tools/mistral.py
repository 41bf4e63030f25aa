"""Mistral's formats after the token [TOOL_CALLS]: a list of objects, or a name, [ARGS] and arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from fastgen.text.tools.events import CallArguments, CallBegun, CallBroken
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, quoted, repeated
from fastgen.text.tools.json_text import JsonReader, loaded
from fastgen.text.tools.parser import Machine

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # required by Mistral's templates
_LONGEST_NAME = 256


class Mistral(ToolFormat):
    """The list format, up to tokenizer version 7."""

    name = "mistral"
    opening = _CALLS
    marks: tuple[str, ...] = (_CALLS, _ARGS, _ID)
    example = f'{_CALLS}[{{"name": <function name>, "arguments": <object>}}]'

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser of either form. Unknown function names are passed on."""
        del tools
        return _Reader()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; `calls` matches one or more calls."""
        return (
            f"calls: {spell(_CALLS)} opened\n"
            f'opened: " "? "[" {repeated("call", quoted(", "), most_calls)} "]"\n'
            f"call: {named_objects(tools)}\n{json_arguments(tools)}"
        )

    def new_id(self) -> str:
        """Return a new call id, as Mistral's templates require it."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


class MistralArguments(Mistral):
    """The format from tokenizer version 11, whose vocabulary has [ARGS]: `[TOOL_CALLS]name[ARGS]{...}`."""

    example = f"{_CALLS}<function name>{_ARGS}<object>"

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; `calls` matches one or more calls."""
        bodies = [f"{quoted(tool.name)} {spell(_ARGS)} arguments_{i}" for i, tool in enumerate(tools)]
        return (
            f"calls: {spell(_CALLS)} opened\nopened: {repeated('call', spell(_CALLS), most_calls)}\n"
            f"call: {' | '.join(bodies)}\n{json_arguments(tools)}"
        )


class _Reader(Machine):
    def __init__(self) -> None:
        super().__init__(self._reading)
        self._arguments = JsonReader()
        self._raw = ""

    def _reading(self) -> bool:
        return self.seek(_CALLS, self._opened)

    def _opened(self) -> bool:
        body = self.buffer.lstrip()
        if not body and not self.ended:
            return False
        in_list = body.startswith("[")
        self.state = self.read_list(_CALLS, self._reading, self._reading) if in_list else self._naming
        return True

    def _naming(self) -> bool:
        """Parse `name[ARGS]`, with or without an id in between."""
        place = self.buffer.find(_ARGS)
        if place < 0 or place > _LONGEST_NAME:
            if place < 0 and not self.ended and len(self.buffer) <= _LONGEST_NAME + len(_ARGS):
                return False
            self._show_mark()
            return True
        name = self.buffer[:place].partition(_ID)[0].strip()
        if not name:
            self._show_mark()
            return True
        self._raw = _CALLS + self.buffer[:place] + _ARGS
        self.buffer = self.buffer[place + len(_ARGS) :]
        self.note([CallBegun(self.num_calls, name)])
        self._arguments = JsonReader()
        self.state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        index = self.num_calls - 1
        piece, end = self._arguments.push(self.buffer)
        taken, self.buffer = (self.buffer, "") if end is None else (self.buffer[:end], self.buffer[end:])
        self._raw += taken
        if piece:
            self.note([CallArguments(index, piece)])
        if end is None:
            return False
        if not isinstance(loaded(self._raw.partition(_ARGS)[2]), dict):
            self.note([CallBroken(index, self._raw)])
        self.state = self._reading
        return True

    def _show_mark(self) -> None:
        """Emit the mark and the text after it as content: they form no call."""
        self.show(_CALLS)
        self.state = self._reading
