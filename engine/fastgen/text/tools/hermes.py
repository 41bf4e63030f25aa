"""Hermes format (also Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

SmolLM2 writes a list of such objects between one pair of tags; both are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastgen.text.grammars.lark import quoted
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, repeated
from fastgen.text.tools.parser import STRAYS, Machine

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ENDS = (_CLOSE, "```")
_FENCE = "```json"
_HEAD = re.compile(rf"(?:\s|{_OPEN}|```(?:json)?(?=[\s{{\[]))*")


class Hermes(ToolFormat):
    """The Hermes format."""

    opening = _OPEN
    marks: tuple[str, ...] = (_OPEN, _CLOSE)
    example = f'{_OPEN}\n{{"name": <function name>, "arguments": <object>}}\n{_CLOSE}'

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser. The tags identify a call, so unknown function names are passed on."""
        del tools
        return _Reader()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`."""
        return (
            f"calls: {spell(_OPEN)} opened\n"
            f"opened: {repeated('call', f'{quoted(chr(10))} {spell(_OPEN)}', most_calls)}\n"
            f"call: {quoted(chr(10))} ({named_objects(tools)}) {quoted(chr(10))} {spell(_CLOSE)}\n"
            f"{json_arguments(tools)}"
        )


class _Reader(Machine):
    def __init__(self) -> None:
        super().__init__(self._reading)

    def _reading(self) -> bool:
        return self.seek(_OPEN, self._opened)

    def _opened(self) -> bool:
        """Parse what follows the opening mark: calls, possibly in a code fence or after another mark."""
        head = self.take_head(_HEAD, (_OPEN, _FENCE))
        if head is None:
            return False
        prefix = _OPEN + head
        if self.buffer.startswith("{"):
            self.state = self.read_call(prefix, None, self._inside, self._reading, _ENDS)
        elif self.buffer.startswith("["):
            self.state = self.read_list(prefix, self._inside, self._reading, marks=_ENDS)
        else:
            self.show(prefix)
            self.state = self._reading
        return True

    def _inside(self) -> bool:
        """Drop text without meaning after a call, its closing mark included."""
        has_mark = self.drop(STRAYS, _CLOSE)
        if has_mark is None:
            return False
        self.state = self._reading if has_mark else self._before_end
        return True

    def _before_end(self) -> bool:
        """Show text between a call and its closing mark."""
        found = self.reach((_OPEN, _CLOSE), self._reading)
        if self.buffer.startswith(_CLOSE):
            self.state = self._inside
        return found
