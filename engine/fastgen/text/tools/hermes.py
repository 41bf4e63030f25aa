"""Hermes format (also Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

SmolLM2 writes a list of such objects between one pair of tags; both are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, json_arguments, named_objects, quoted, repeated
from fastgen.text.tools.parser import Machine

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """The Hermes format."""

    name = "hermes"
    opening = _OPEN
    marks: tuple[str, ...] = (_OPEN, _CLOSE)
    example = f'{_OPEN}\n{{"name": <function name>, "arguments": <object>}}\n{_CLOSE}'

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser. The tags identify a call, so unknown function names are passed on."""
        del tools
        return _Reader()

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; `calls` matches one or more calls."""
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
