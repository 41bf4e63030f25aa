"""Calls as bare JSON: Llama 3.x's format, and the one for models that were taught none."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.tools.events import ToolParser
from fastgen.text.tools.format import OfferedTool, Spell, json_arguments, long_id, named_objects, quoted, repeated
from fastgen.text.tools.parser import Machine

_PYTHON_TAG = "<|python_tag|>"


class PlainJson:
    """An answer that is nothing but calls: `{"name": ..., "arguments": ...}`, or several in a list."""

    name = "json"
    marks: tuple[str, ...] = ()
    example = '{"name": <function name>, "arguments": <object>}'
    _arguments = "arguments"

    def parser(self, tools: Sequence[OfferedTool]) -> ToolParser:
        """A reader of one answer. Nothing but its name tells a call from any other JSON: it must have been offered."""
        return _Reader(frozenset(tool.name for tool in tools))

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Lark rules of which `calls` is one call or more."""
        del spell
        call = named_objects(tools, self._arguments)
        return f"calls: {repeated('call', quoted('; '), most_calls)}\ncall: {call}\n{json_arguments(tools)}"

    def new_id(self) -> str:
        """An id for a call."""
        return long_id()


class Llama3Json(PlainJson):
    """Llama 3.1 and 3.2: the arguments are called parameters, and a special token may come first."""

    name = "llama3_json"
    marks = (_PYTHON_TAG,)
    example = '{"name": <function name>, "parameters": <object>}'
    _arguments = "parameters"


class _Reader(Machine):
    """Calls stand at the very beginning; whatever follows something else is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(self._beginning)
        self._names = names
        self._prefix = ""

    def _beginning(self) -> bool:
        body = self.buffer.lstrip()
        if not self.ended and len(body) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(body):
            return False
        after_tag = body.removeprefix(_PYTHON_TAG).lstrip()
        if not after_tag and not self.ended:
            return False
        if after_tag.startswith("{"):
            self._read_at(after_tag)
        elif after_tag.startswith("["):
            inside = after_tag[1:].lstrip()
            if not inside and not self.ended:
                return False
            if inside.startswith("{"):
                self._read_at(inside)
            else:
                self.state = self._content
        else:
            self.state = self._content
        return True

    def _read_at(self, body: str) -> None:
        """Reads a call at the beginning of `body`, an end of the buffer."""
        self._prefix, self.buffer = self.buffer[: len(self.buffer) - len(body)], body
        self.state = self.read_call(self._prefix, self._names, self._between, self._content)

    def _between(self) -> bool:
        """After a call: another one behind a separator, or the end of a list."""
        body = self.buffer.lstrip(" \t\r\n;,")
        if not body:
            if not self.ended:
                return False
            self.buffer = ""
            return False
        if body.startswith("{"):
            self._read_at(body)
        else:
            self.buffer = body.removeprefix("]")
            self.state = self._content
        return True

    def _content(self) -> bool:
        self.show(self.buffer)
        self.buffer = ""
        return False
