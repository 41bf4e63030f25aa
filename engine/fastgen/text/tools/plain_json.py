"""Bare-JSON formats: Llama 3.x's, and a default for models without a format."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastgen.text.grammars.lark import escaped, quoted
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, repeated
from fastgen.text.tools.parser import STRAYS, Machine

_PYTHON_TAG, _FENCE = "<|python_tag|>", "```json"
_HEAD = re.compile(rf"(?:\s|{re.escape(_PYTHON_TAG)}|```(?:json)?(?=[\s{{\[]))*")
_ENDS = (_PYTHON_TAG, "```")
_SEPARATORS = (";", ",", "}", _PYTHON_TAG)


class PlainJson(ToolFormat):
    """Generations that are only calls: `{"name": ..., "arguments": ...}`, or a list of them."""

    opening = ""
    other_openings = (_PYTHON_TAG,)
    head = rf"(\s|{escaped(_PYTHON_TAG)}|```(json)?)*"
    marks: tuple[str, ...] = ()
    example = '{"name": <function name>, "arguments": <object>}'
    _arguments = "arguments"

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser. Only an offered function name distinguishes a call from other JSON."""
        return _Reader(frozenset(tool.name for tool in tools))

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`."""
        del spell
        call = named_objects(tools, self._arguments)
        return f"calls: {repeated('call', quoted('; '), most_calls)}\ncall: {call}\n{json_arguments(tools)}"


class Llama3Json(PlainJson):
    """Llama 3.1 and 3.2: the key is `parameters`, and a special token may come first."""

    marks = (_PYTHON_TAG,)
    example = '{"name": <function name>, "parameters": <object>}'
    _arguments = "parameters"


class _Reader(Machine):
    """Parses calls at the beginning of a generation, maybe in a code fence; all other text is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(self._beginning)
        self._names = names

    def _beginning(self) -> bool:
        head = self.take_head(_HEAD, (_PYTHON_TAG, _FENCE))
        if head is None:
            return False
        if self.buffer.startswith(("{", "[")):
            self.state = self.read_list(
                head, self._behind, self._content, names=self._names, separators=_SEPARATORS, marks=_ENDS
            )
        else:
            self.show(head)
            self.state = self._content
        return True

    def _behind(self) -> bool:
        """Drop text without meaning after the calls."""
        if self.drop(STRAYS) is None:
            return False
        self.state = self._content
        return True

    def _content(self) -> bool:
        self.show(self.buffer)
        self.buffer = ""
        return False
