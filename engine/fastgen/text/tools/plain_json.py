"""Bare-JSON formats: Llama 3.x's, and a default for models without a format."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, quoted, repeated
from fastgen.text.tools.parser import Machine

_PYTHON_TAG = "<|python_tag|>"


class PlainJson(ToolFormat):
    """Generations that are only calls: `{"name": ..., "arguments": ...}`, or a list of them."""

    name = "json"
    opening = ""
    marks: tuple[str, ...] = ()
    example = '{"name": <function name>, "arguments": <object>}'
    _arguments = "arguments"

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser. Only an offered function name distinguishes a call from other JSON."""
        return _Reader(frozenset(tool.name for tool in tools))

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; `calls` matches one or more calls."""
        del spell
        call = named_objects(tools, self._arguments)
        return f"calls: {repeated('call', quoted('; '), most_calls)}\ncall: {call}\n{json_arguments(tools)}"


class Llama3Json(PlainJson):
    """Llama 3.1 and 3.2: the key is `parameters`, and a special token may come first."""

    name = "llama3_json"
    marks = (_PYTHON_TAG,)
    example = '{"name": <function name>, "parameters": <object>}'
    _arguments = "parameters"


class _Reader(Machine):
    """Parses calls at the beginning of the generation; text after anything else is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(self._beginning)
        self._names = names

    def _beginning(self) -> bool:
        body = self.buffer.lstrip()
        if not self.ended and len(body) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(body):
            return False
        after_tag = body.removeprefix(_PYTHON_TAG).lstrip()
        if not after_tag and not self.ended:
            return False
        self.state = self._content
        if after_tag.startswith(("{", "[")):
            prefix, self.buffer = self.buffer[: len(self.buffer) - len(after_tag)], after_tag
            self.state = self.read_list(prefix, self._content, self._content, names=self._names, separators=";,")
        return True

    def _content(self) -> bool:
        self.show(self.buffer)
        self.buffer = ""
        return False
