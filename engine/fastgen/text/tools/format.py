"""Interface of a tool-call format: its parser and its grammar."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastgen.text.grammars.lark import arguments_body, quoted
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.output_events import OutputEvent

# Schema of arguments that may be any object.
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """An offered function and the JSON schema of its arguments.

    Attributes:
        strict: whether each call must match the schema, even one that the model is free to make.
        required: whether it is one of the functions of which the model must call one.
        exclusive: whether a grammar must keep the model from calling functions that are not offered.
        must_hold: whether the request is rejected if the schema cannot be enforced.
        enforced: whether a grammar of calls has the schema; if not, any object may be the arguments.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    required: bool = False
    exclusive: bool = False
    must_hold: bool = False
    enforced: bool = True

    @property
    def enforced_schema(self) -> Mapping[str, Any]:
        """What the arguments of a call must match."""
        return self.schema if self.enforced else ANY_ARGUMENTS


# Spells text in a Lark grammar: as a literal, or as a special token of the vocabulary.
Spell = Callable[[str], str]


class CallParser(Protocol):
    """Parses the content and the calls of one generation."""

    def push(self, text: str) -> list[OutputEvent]:
        """Return the events that this text completes."""

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events at the end of the generation."""


class ToolFormat(Protocol):
    """Base class of the formats, which `TOOL_FORMATS` in `fastgen.settings` lists."""

    # Text that begins the calls and nothing else; "" if a call begins the generation, and looks like other JSON.
    opening: str
    # More texts that the parser takes for the beginning of a call.
    other_openings: tuple[str, ...] = ()
    # What the parser skips before a call that begins a generation, as a regular expression of Lark.
    head: str = ""
    # Marks and text that begin an answer, if answers have a header of their own.
    answer_head: tuple[str, ...] = ()
    # Marks around calls. If they are special tokens, the detokenizer must still show them.
    marks: tuple[str, ...]
    # Example call for models whose template does not mention tools.
    example: str

    def can_call(self, name: str) -> bool:
        """Return whether the parser finds the name of a function with this name."""
        del name
        return True

    def parser(self, tools: Sequence[OfferedTool]) -> CallParser:
        """Return a parser of one generation with `tools` offered."""

    def rules(self, tools: Sequence[OfferedTool], spell: Spell, *, most_calls: int | None) -> str:
        """Return Lark rules; the rule `calls` matches one call if `most_calls` is 1, otherwise one or more.

        If the format has an `opening`, the rule `opened` matches what follows it.

        Raises:
            SchemaError: if the schema of a tool cannot be enforced.
        """

    def new_id(self) -> str:
        """Return a new call id, in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"


def repeated(item: str, separator: str, most: int | None) -> str:
    """Return a rule body: one `item` if `most` is 1, otherwise one or more with `separator` between."""
    return item if most == 1 else f"{item} ({separator} {item})*"


def json_arguments(tools: Sequence[OfferedTool]) -> str:
    """Return a rule `arguments_i` for the arguments of each tool i.

    Raises:
        SchemaError: if a schema cannot be enforced. The message names the tool.
    """
    return "".join(f"arguments_{i}: {_arguments_of(tool)}\n" for i, tool in enumerate(tools))


def _arguments_of(tool: OfferedTool) -> str:
    try:
        return arguments_body(tool.enforced_schema)
    except SchemaError as error:
        raise SchemaError.at(f"parameters of {tool.name}", str(error)) from None


def named_objects(tools: Sequence[OfferedTool], arguments: str = "arguments") -> str:
    """Return a rule body: a call of any tool as an object with its name and `arguments`."""
    return " | ".join(
        f'{quoted(f"""{{"name": {quoted(tool.name)}, "{arguments}": """)} arguments_{i} "}}"'
        for i, tool in enumerate(tools)
    )
