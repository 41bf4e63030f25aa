"""Mistral's formats after the token [TOOL_CALLS]: a list of objects, or a name, [ARGS] and arguments.

Models also write one object instead of a list, and leave [ARGS] out, which vLLM reads too.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from fastgen.text.grammars.lark import quoted
from fastgen.text.output_events import CallArguments, CallBegun
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, repeated
from fastgen.text.tools.json_text import JsonReader
from fastgen.text.tools.parser import STRAYS, Machine

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # required by Mistral's templates
_LONGEST_NAME = 256
# A name whose arguments follow at once.
_BARE = re.compile(r"[\w.-]+(?=\{)")
_HEAD = re.compile(rf"(?:\s|{re.escape(_CALLS)})*")


class Mistral(ToolFormat):
    """The list format, up to tokenizer version 7."""

    opening = _CALLS
    marks: tuple[str, ...] = (_CALLS, _ARGS, _ID)
    example = f'{_CALLS}[{{"name": <function name>, "arguments": <object>}}]'

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser of either form. Unknown function names are passed on."""
        del tools
        return _Reader()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`."""
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

    def can_call(self, name: str) -> bool:
        """Return whether the name ends before its arguments."""
        return name == name.strip() and len(name) <= _LONGEST_NAME and not any(mark in name for mark in "[{")

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`."""
        bodies = [f"{quoted(tool.name)} {spell(_ARGS)} arguments_{i}" for i, tool in enumerate(tools)]
        return (
            f"calls: {spell(_CALLS)} opened\nopened: {repeated('call', spell(_CALLS), most_calls)}\n"
            f"call: {' | '.join(bodies)}\n{json_arguments(tools)}"
        )


class _Reader(Machine):
    def __init__(self) -> None:
        super().__init__(self._reading)
        self._arguments = JsonReader()
        self._prefix = ""

    def _reading(self) -> bool:
        return self.seek(_CALLS, self._opened)

    def _opened(self) -> bool:
        head = self.take_head(_HEAD, (_CALLS,))
        if head is None:
            return False
        self._prefix = _CALLS + head
        self.state = self._naming
        if self.buffer.startswith("["):
            self.state = self.read_list(self._prefix, self._behind, self._reading, marks=(_CALLS,))
        elif self.buffer.startswith("{"):
            self.state = self.read_call(self._prefix, None, self._behind, self._reading, marks=(_CALLS,))
        return True

    def _naming(self) -> bool:
        """Parse `name[ARGS]`, with or without an id in between, or a bare name."""
        if bare := _BARE.match(self.buffer[: _LONGEST_NAME + 1]):
            return self._called(bare[0], self.buffer[bare.end() :])
        place = self.buffer.find(_ARGS)
        if place < 0 or place > _LONGEST_NAME:
            if place < 0 and not self.ended and len(self.buffer) <= _LONGEST_NAME + len(_ARGS):
                return False
            self._show_mark()
            return True
        name, arguments = self.buffer[:place].partition(_ID)[0].strip(), self.buffer[place + len(_ARGS) :].lstrip()
        if not arguments and not self.ended:
            return False
        if not name or not "{".startswith(arguments[:1]):
            self._show_mark()
            return True
        return self._called(name, arguments)

    def _called(self, name: str, arguments: str) -> bool:
        self.buffer = arguments
        self.note([CallBegun(self.num_calls, name)])
        self._arguments = JsonReader((_CALLS,))
        self.state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        piece, rest = self._arguments.push(self.buffer)
        self.buffer = rest or ""
        if piece:
            self.note([CallArguments(self.num_calls - 1, piece)])
        if rest is None:
            return False
        self.state = self._behind
        return True

    def _behind(self) -> bool:
        """Drop text without meaning after a call."""
        if self.drop(STRAYS) is None:
            return False
        self.state = self._reading
        return True

    def _show_mark(self) -> None:
        """Emit the mark and the text after it as content: they form no call."""
        self.show(self._prefix)
        self.state = self._reading
