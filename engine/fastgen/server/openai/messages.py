"""The parts of a chat: messages, the tools offered, and what is said about their use."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fastgen.server.openai.field_types import Text

_LONGEST_TOOL_NAME = 256


def _content(value: Any) -> str | None:
    """A message's text, in one piece."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a text, a list of text parts or null")
    return "".join(_part(part) for part in value)


def _part(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise ValueError(f"holds a part of type {str(kind)[:40]!r}; only text parts are served")
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f"holds a {kind} part without a text")
    return text


def _tool_calls(value: Any) -> list[dict[str, Any]] | None:
    """An assistant's earlier calls, their arguments as objects: templates write these as JSON themselves."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list of tool calls")
    return [_tool_call(call) for call in value]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("each call must hold a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may have written no JSON, or been cut short: the template then gets to see it as it is.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}


_PART = {"type": "object", "required": ["type"]}
Content = Annotated[
    str | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
ToolCalls = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_tool_calls),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]


class Message(BaseModel):
    """One message; what else a client puts in it is for the model's template."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Content = None
    tool_calls: ToolCalls = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates expect it: content as one text, nothing that is null."""
        others = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if value is not None}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": self.role, "content": self.content or "", **others, **calls}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[Text, Field(min_length=1, max_length=_LONGEST_TOOL_NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool offered; functions are the only kind."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as templates expect it: as it came."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a client says about the use of tools: `name` is the one that must be called."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _tool_choice(value: Any) -> Choice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return Choice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return Choice("required", name)
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


ToolChoice = Annotated[
    Choice | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}),
]
