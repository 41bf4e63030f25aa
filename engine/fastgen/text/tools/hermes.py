"""Calls in tags, as Hermes and Qwen 2.5 and 3 write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

SmolLM2 writes a list of such objects between one pair of tags; both are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.tools.events import ToolParser
from fastgen.text.tools.format import OfferedTool, Spell, json_arguments, long_id, named_objects, quoted, repeated
from fastgen.text.tools.parser import Machine

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """The format of tags."""

    name = "hermes"
    marks: tuple[str, ...] = (_OPEN, _CLOSE)
    example = f'{_OPEN}\n{{"name": <function name>, "arguments": <object>}}\n{_CLOSE}'

    def parser(self, tools: Sequence[OfferedTool]) -> ToolParser:
        """A reader of one answer. The tags make a call clear: a name that nobody offered is passed on."""
        del tools
        return _Reader()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Lark rules of which `calls` is one call or more."""
        return (
            f"calls: {repeated('call', quoted(chr(10)), most_calls)}\n"
            f"call: {spell(_OPEN)} {quoted(chr(10))} ({named_objects(tools)}) {quoted(chr(10))} {spell(_CLOSE)}\n"
            f"{json_arguments(tools)}"
        )

    def new_id(self) -> str:
        """An id for a call."""
        return long_id()


class _Reader(Machine):
    def __init__(self) -> None:
        super().__init__(self._reading)

    def _reading(self) -> bool:
        return self.seek(_OPEN, self._opened)

    def _opened(self) -> bool:
        body = self.buffer.lstrip()
        if not body and not self.ended:
            return False
        if body.startswith("{"):
            prefix, self.buffer = _OPEN + self.buffer[: -len(body)], body
            self.state = self.read_call(prefix, None, self._closing, self._reading)
        elif body.startswith("["):
            self.state = self.read_list(_OPEN, self._closing, self._reading)
        else:
            self.show(_OPEN)
            self.state = self._reading
        return True

    def _closing(self) -> bool:
        return self.skip(_CLOSE, self._reading)
