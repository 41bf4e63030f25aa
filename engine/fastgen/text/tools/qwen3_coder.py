"""Qwen3-Coder format: a tag for the function and one for each parameter with its bare value.

The format is that of the model's chat template; the parser behaves like vLLM's `qwen3_coder`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastgen.text.grammars.lark import json_body, quoted
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.output_events import CallArguments, CallBegun
from fastgen.text.spelled_marks import unguarded
from fastgen.text.tools.format import OfferedTool, Spell, ToolFormat, repeated
from fastgen.text.tools.json_text import dumped
from fastgen.text.tools.parameter_values import ParameterSchema, declared_parameters
from fastgen.text.tools.parser import Machine

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256
_HEADER = re.compile(rf"({_OPEN}\s*)?{_FUNCTION}([^>\n]{{1,{_LONGEST_NAME}}})>")
# Ends of a value. Models sometimes omit the closing tag, so other unlikely tags end a value too.
_ENDS = (_PARAMETER_END, f"{_FUNCTION_END}\n{_CLOSE}", f"{_FUNCTION_END}{_CLOSE}")
_VALUE_ENDS = (*(f"\n{tag}" for tag in (*_ENDS, _PARAMETER)), *_ENDS)
# What follows a closed value. A closing tag before anything else is text of the value: values have no escapes.
_AFTER_VALUE = (_PARAMETER, _FUNCTION_END, _CLOSE, _OPEN)
_END_OF_VALUE = quoted(f"\n{_PARAMETER_END}\n")
# Lark terminal: text without any of these.
_TEXT = r"/(?s:.*)/ & ~/(?s:.*)(<\/parameter>|<\/function>\n?<\/tool_call>|\n<parameter=)(?s:.*)/"


class Qwen3Coder(ToolFormat):
    """The Qwen3-Coder format."""

    opening = _OPEN
    other_openings = (_FUNCTION,)
    marks: tuple[str, ...] = (_OPEN, _CLOSE)
    example = (
        f"{_OPEN}\n{_FUNCTION}function name>\n{_PARAMETER}parameter name>\n<value>\n{_PARAMETER_END}\n"
        f"{_FUNCTION_END}\n{_CLOSE}"
    )

    def can_call(self, name: str) -> bool:
        """Return whether a tag can name it."""
        return (header := _HEADER.fullmatch(f"{_FUNCTION}{name}>")) is not None and header[2] == name

    def parser(self, tools: Sequence[OfferedTool]) -> Machine:
        """Return a parser. Without the outer tags a call must name an offered function."""
        return _Reader(tools)

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; see `ToolFormat.rules`. Parameters are in the order of the schema."""
        functions = " | ".join(f"function_{i}" for i in range(len(tools)))
        return (
            f"calls: {spell(_OPEN)} opened\n"
            f"opened: {repeated('call', f'{quoted(chr(10))} {spell(_OPEN)}', most_calls)}\n"
            f"call: {quoted(chr(10))} ({functions}) {quoted(chr(10))} {spell(_CLOSE)}\n"
            f"{''.join(_function(i, tool) for i, tool in enumerate(tools))}"
            f'any_parameter: "{_PARAMETER}" /[^>\\n]{{1,{_LONGEST_NAME}}}/ ">\\n" TEXT\n'
            f"TEXT: TEXT_BODY {_END_OF_VALUE}\nTEXT_BODY: {_TEXT}\n"
        )


def _function(number: int, tool: OfferedTool) -> str:
    """Return the rules of one function."""
    body, rules = [quoted(f"{_FUNCTION}{tool.name}>\n")], []
    schema = tool.enforced_schema
    declared, required = declared_parameters(schema)
    for place, name in enumerate(declared):
        parameter = f"parameter_{number}_{place}"
        body.append(parameter if name in required else f"{parameter}?")
        head = quoted(f"{_PARAMETER}{name}>\n")
        try:
            if ">" in name or len(_PARAMETER) + len(name) > _LONGEST_NAME:
                raise SchemaError("a tag cannot have this name")
            rules.append(f"{parameter}: {head} {_value(ParameterSchema(schema, name))}\n")
        except SchemaError as error:
            raise SchemaError.at(f"parameters of {tool.name}.properties.{name}", str(error)) from None
    if not declared and schema.get("additionalProperties") is not False:
        body.append("any_parameter*")
    return f"function_{number}: {' '.join(body)} {quoted(_FUNCTION_END)}\n" + "".join(rules)


def _value(parameter: ParameterSchema) -> str:
    """Return the end of a rule: a parameter's value and its closing tag."""
    if parameter.choices:
        texts = (value if isinstance(value, str) else dumped(value) for value in parameter.choices)
        return f"({' | '.join(map(quoted, texts))}) {_END_OF_VALUE}"
    if not parameter.types or "string" in parameter.types:
        return "TEXT"
    return f"{json_body(parameter.schema)} {_END_OF_VALUE}"


class _Reader(Machine):
    """Passes text values on as they arrive, other values when complete.

    If a generation ends inside a value, the arguments of the call are truncated, as in the other formats.
    """

    def __init__(self, tools: Sequence[OfferedTool]) -> None:
        super().__init__(self._reading)
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._schema: Mapping[str, Any] = {}
        self._parameter = ParameterSchema({}, "")
        self._value: list[str] = []
        self._separator = ""

    def _reading(self) -> bool:
        return self.reach((_OPEN, _FUNCTION), self._opened)

    def _opened(self) -> bool:
        """Parse a function's name, with or without the outer tag, which some models omit."""
        header = _HEADER.match(self.buffer)
        if header and (header[1] or header[2] in self._schemas):
            self.buffer = self.buffer[header.end() :]
            self._schema, self._separator = self._schemas.get(header[2], {}), ""
            self.note([CallBegun(self.num_calls, header[2])])
            self._write("{")
            self.state = self._between
            return True
        if not header and not self.ended and _may_become_header(self.buffer):
            return False
        mark = _OPEN if self.buffer.startswith(_OPEN) else _FUNCTION
        self.show(mark)
        self.buffer = self.buffer.removeprefix(mark)
        self.state = self._reading
        return True

    def _between(self) -> bool:
        """Find the next parameter or the function's end; ignore other text."""
        _, found = self.take_until(_AFTER_VALUE)
        if not found and not self.ended:
            return False
        if self.buffer.startswith(_PARAMETER):
            self.state = self._naming
        else:
            self._write("}")
            self.buffer = self.buffer.removeprefix(_FUNCTION_END)
            self.state = self._closing
        return True

    def _naming(self) -> bool:
        """Parse `<parameter=NAME>`."""
        place = self.buffer.find(">")
        if place < 0 and not self.ended and len(self.buffer) <= _LONGEST_NAME:
            return False
        self.state = self._between
        if not 0 <= place <= _LONGEST_NAME:
            self.buffer = self.buffer.removeprefix(_PARAMETER)
            return True
        name, self.buffer = unguarded(self.buffer[len(_PARAMETER) : place]), self.buffer[place + 1 :]
        self._parameter, self._value = ParameterSchema(self._schema, name), []
        self._write(f"{self._separator}{dumped(name)}: " + ('"' if self._parameter.is_text else ""))
        self._separator = ", "
        self.state = self._at_value
        return True

    def _at_value(self) -> bool:
        """Drop the line break before a value."""
        if not self.buffer:
            return False
        self.buffer = self.buffer.removeprefix("\n")
        self.state = self._in_value
        return True

    def _in_value(self) -> bool:
        taken, found = self.take_until(_VALUE_ENDS)
        self._add(taken)
        if found:
            self.state = self._at_end
        return found

    def _at_end(self) -> bool:
        """End the value, unless its closing tag is text: no other tag follows."""
        tag = next((mark for mark in (f"\n{_PARAMETER_END}", _PARAMETER_END) if self.buffer.startswith(mark)), "")
        after = self.buffer.removeprefix(tag).lstrip()
        may_follow = any(mark.startswith(after) for mark in _AFTER_VALUE)
        if tag and may_follow and not self.ended:
            return False
        if tag and not may_follow and not after.startswith(_AFTER_VALUE):
            self._add(tag)
            self.buffer = self.buffer.removeprefix(tag)
            self.state = self._in_value
            return True
        self._write('"' if self._parameter.is_text else self._parameter.value(unguarded("".join(self._value))))
        self.buffer = self.buffer.removeprefix("\n").removeprefix(_PARAMETER_END)
        self.state = self._between
        return True

    def _add(self, text: str) -> None:
        """Add text to the value."""
        if self._parameter.is_text:
            self._write(dumped(unguarded(text))[1:-1])
        else:
            self._value.append(text)

    def _closing(self) -> bool:
        """Drop text without meaning after a function, its closing mark included."""
        has_mark = self.drop((_FUNCTION_END, _PARAMETER_END), _CLOSE)
        if has_mark is None:
            return False
        self.state = self._reading if has_mark else self._before_end
        return True

    def _before_end(self) -> bool:
        """Show text between a function and its closing mark."""
        found = self.reach((_OPEN, _FUNCTION, _CLOSE), self._reading)
        if self.buffer.startswith(_CLOSE):
            self.state = self._closing
        return found

    def _write(self, text: str) -> None:
        if text:
            self.note([CallArguments(self.num_calls - 1, text)])


def _may_become_header(text: str) -> bool:
    rest = text.removeprefix(_OPEN).lstrip()
    if len(rest) < len(_FUNCTION):
        return _FUNCTION.startswith(rest)
    name = rest.removeprefix(_FUNCTION)
    return name != rest and len(name) <= _LONGEST_NAME and not re.search(r"[>\n]", name)
