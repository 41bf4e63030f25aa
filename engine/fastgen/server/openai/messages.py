"""Fields of a chat request: messages, tools and the tool choice."""

from __future__ import annotations

import json
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fastgen.server.openai.fields.types import Boolean, String

_MAX_TOOL_NAME_LENGTH = 256


def text_of(content: Any, kinds: Container[str] = ("text", "refusal")) -> str:
    """Return the text of a message's content, with its parts joined.

    Raises:
        ValueError: if it is neither a string nor a list of parts of these kinds.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError("must be a string or a list of text parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"contains a part of type {str(kind)[:40]!r}; only text parts are supported")
        field = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(field), str):
            raise ValueError(f"contains a {kind} part without a string in its {field!r} field")
        texts.append(part[field])
    return "".join(texts)


def _tool_calls(value: Any) -> list[dict[str, Any]] | None:
    """Return an assistant's earlier calls with parsed arguments, which chat templates serialize to JSON themselves."""
    if not isinstance(value, list | None):
        raise ValueError("must be a list of tool calls")
    return value and [_tool_call(call) for call in value]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("each call must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # The model may have written invalid or truncated JSON; the template then gets it unparsed.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}


_Part = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "required": ["type"]})]
Content = Annotated[
    str | None,
    PlainValidator(
        lambda value: None if value is None else text_of(value), json_schema_input_type=str | list[_Part] | None
    ),
]
ToolCalls = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_tool_calls, json_schema_input_type=list[dict[str, Any]] | None),
]


class Message(BaseModel):
    """One message; unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: String
    content: Content = None
    tool_calls: ToolCalls = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates: content as one string, null fields left out."""
        others = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if value is not None}
        if isinstance(others.get("reasoning"), str):  # the field has two names; templates know the older one
            others.setdefault("reasoning_content", others["reasoning"])
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": self.role, "content": self.content or "", **others, **calls}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[String, Field(min_length=1, max_length=_MAX_TOOL_NAME_LENGTH)]
    description: String | None = None
    parameters: dict[str, Any] | None = None
    strict: Boolean | None = None


class Tool(BaseModel):
    """A tool that the model may call; functions are the only kind."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, with all fields that the client sent."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class Choice:
    """A tool choice; `name` is the function that must be called, if the client named one."""

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
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any] | None),
]
