"""Fields of a chat request: messages, tools and the tool choice."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from fastgen.server.http.json_census import check_nested
from fastgen.server.openai.fields.types import Boolean, String
from fastgen.server.openai.fields.unsupported import refused

_MAX_TOOL_NAME_LENGTH = 256
# Names of an assistant's reasoning, as clients spell it.
_REASONING = ("reasoning_content", "reasoning", "thinking")


TextContent = str | list[dict[str, Any]]


def content_of(content: Any, kinds: Container[str] = ("text", "refusal")) -> TextContent:
    """Return a message's content: a string, or its parts as parts of type `text`.

    Raises:
        ValueError: if it is neither a string nor a list of parts of these kinds.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError("must be a string or a list of text parts")
    return [_text_part(part, kinds) for part in content]


def _text_part(part: dict[str, Any], kinds: Container[str]) -> dict[str, Any]:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"contains a part of type {str(kind)[:40]!r}; only text parts are supported")
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(field), str):
        raise ValueError(f"contains a {kind} part without a string in its {field!r} field")
    return part if kind == "text" else {"type": "text", "text": part[field]}


def text_of(content: TextContent | None) -> str:
    """Return content as one string."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def with_text(content: TextContent | None, *, before: str = "", after: str = "") -> TextContent:
    """Return content with more text before or after it, in the same form."""
    if isinstance(content, list):
        first, last = ([{"type": "text", "text": text.strip("\n")}] if text else [] for text in (before, after))
        return [*first, *content, *last]
    return f"{before}{content or ''}{after}"


def _tool_calls(value: Any) -> list[dict[str, Any]] | None:
    """Return an assistant's earlier calls."""
    if not isinstance(value, list | None):
        raise ValueError("must be a list of tool calls")
    return value and [_tool_call(call) for call in value]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("each call must have a function with a name")
    return {**call, "type": "function"}


_Part = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "required": ["type"]})]
MessageContent = Annotated[
    TextContent | None,
    PlainValidator(
        lambda value: None if value is None else content_of(value), json_schema_input_type=str | list[_Part] | None
    ),
]
ToolCalls = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_tool_calls, json_schema_input_type=list[dict[str, Any]] | None),
]


class ChatMessage(BaseModel):
    """One message.

    Fields that OpenAI's API does not define are passed to the chat template: some templates read their own.
    """

    model_config = ConfigDict(extra="allow")

    role: String
    content: MessageContent = None
    tool_calls: ToolCalls = None
    refusal: String | None = None
    # Templates know neither, so the message would be lost.
    function_call: Any = refused("use tool_calls")
    audio: Any = refused("only text is supported")

    def for_template(self) -> dict[str, Any]:
        """Return the message for `ChatTemplate`, null fields left out except for the content.

        A refusal is the content of a message without one.
        """
        others = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if value is not None}
        # The field has three names; templates know one of the older ones.
        reasoning = next((others[name] for name in _REASONING if isinstance(others.get(name), str)), None)
        if reasoning is not None:
            others = {"reasoning_content": reasoning, "thinking": reasoning, **others}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        content = self.refusal if self.content is None else self.content
        return {"role": self.role, "content": content, **others, **calls}


def _bounded(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Reject earlier calls whose arguments take too long to parse."""
    calls = [call["function"].get("arguments") for message in messages for call in message.tool_calls or ()]
    check_nested(arguments for arguments in calls if isinstance(arguments, str))
    return messages


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), AfterValidator(_bounded)]


class ToolFunction(BaseModel):
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
    function: ToolFunction

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(given)
        tool._given = given if isinstance(given, dict) else tool.model_dump(exclude_unset=True)
        return tool

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, as the client sent it: many print it, with its fields in that order."""
        return self._given


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which functions the model may or must call.

    Attributes:
        mode: `required` if it must call one.
        functions: names of the only functions that it may call; None for all.
        is_single: whether it must make one call only, as with a function that the request names.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    functions: tuple[str, ...] | None = None
    is_single: bool = False


def _tool_choice(value: Any) -> ToolChoice:
    match value:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (name,), is_single=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return ToolChoice(mode, tuple(_allowed_tool(tool) for tool in _not_empty(tools)))
        case {"type": "allowed_tools"}:
            raise ValueError('allowed_tools must be {"mode": "auto" or "required", "tools": [...]}')
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def _not_empty(tools: list[Any]) -> list[Any]:
    if not tools:
        raise ValueError('allowed_tools has no tools; name some, or use "none"')
    return tools


def _allowed_tool(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError('each allowed tool must be {"type": "function", "function": {"name": ...}}')


ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any] | None),
]
