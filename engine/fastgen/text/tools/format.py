"""A way to write tool calls: how it is read, and what it is made of where it must be kept to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastgen.text.grammar import JSON_SPACE
from fastgen.text.tools.events import ToolParser


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


# A text as it is written in a Lark grammar: as a literal, or as the special token that it is in this vocabulary.
Spell = Callable[[str], str]


class ToolFormat(Protocol):
    """One format. Its name is what `--tool-parser` calls it."""

    name: str
    # What it writes around calls; where these are special tokens, the text must show them all the same.
    marks: tuple[str, ...]
    # One call, as a model is told to write it whose own template tells nothing of tools.
    example: str

    def parser(self, tools: Sequence[OfferedTool]) -> ToolParser:
        """A reader of one answer, where `tools` are offered."""

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Lark rules of which `calls` is one call or more, up to `most_calls`; None is no limit."""

    def new_id(self) -> str:
        """An id for a call."""


def long_id() -> str:
    """An id as OpenAI's are."""
    return f"call_{secrets.token_hex(12)}"


def quoted(text: str) -> str:
    """`text` as a string literal of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def repeated(item: str, separator: str, most: int | None) -> str:
    """A rule's body: `item` once, or several times with `separator` between."""
    return item if most == 1 else f"{item} ({separator} {item})*"


def json_body(schema: Mapping[str, Any]) -> str:
    """A rule's body: JSON by a schema."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': JSON_SPACE}, **schema})}"


def json_arguments(tools: Sequence[OfferedTool]) -> str:
    """A rule for the arguments of each tool as an object: `arguments_i` for the tool i."""
    return "".join(f"arguments_{i}: {json_body(tool.schema)}\n" for i, tool in enumerate(tools))


def named_objects(tools: Sequence[OfferedTool], arguments: str = "arguments") -> str:
    """A rule's body: a call of any of the tools as an object with its name and its `arguments`."""
    return " | ".join(
        f'{quoted(f"""{{"name": {quoted(tool.name)}, "{arguments}": """)} arguments_{i} "}}"'
        for i, tool in enumerate(tools)
    )
