"""Request bodies of /v1/responses, and the chat completions that they stand for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from fastgen.core.request import RequestError
from fastgen.server.openai.fields.types import Boolean, Integer, String
from fastgen.server.openai.fields.unsupported import OpenAIFields, ignored, refused
from fastgen.server.openai.protocol import ChatRequest, SamplingNumbers
from fastgen.server.openai.response_api.input_items import messages_of

_NOT_STORED = "nothing is stored; send the whole input"
# Fields of chat completions that have the same name and meaning here. They are validated there.
_PASSED = (
    *SamplingNumbers.model_fields,
    "model",
    "parallel_tool_calls",
    "stream",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
    "priority",
    "timeout",
    "cache_salt",
    "chat_template_kwargs",
    "thinking_token_budget",
    "include_reasoning",
)
# Names of fields here by their name in a chat completion.
ALIASES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "deadline_seconds": "timeout",
}


def _input(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of input items")
    return messages_of(value)


def _text_config(value: Any) -> dict[str, Any] | None:
    """Return `text.format` as a chat's `response_format`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if value.get("verbosity") not in (None, "medium"):
        raise ValueError('verbosity is not supported; leave it out or set it to "medium"')
    given = value.get("format")
    if given is None or not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    described = {name: item for name, item in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _reasoning(value: Any) -> str | None:
    """Return the reasoning's effort."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for name, neutral in (("summary", "auto"), ("generate_summary", "auto"), ("context", "auto"), ("mode", "standard")):
        if value.get(name) not in (None, neutral):
            raise ValueError(f'{name}: only "{neutral}" is supported; reasoning is returned in full')
    effort = value.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise ValueError("effort must be a string")
    return effort


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat completions, which nests the function."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("must be a list of tools")
    for tool in value:
        if tool.get("type") != "function":
            raise ValueError(f"{str(tool.get('type'))[:40]!r} is not built; functions are the only kind of tools")
        if not isinstance(tool.get("name"), str):
            raise ValueError("each function must have a name")
    return [
        {
            "type": "function",
            "function": {name: item for name, item in tool.items() if name != "type" and item is not None},
        }
        for tool in value
    ]


def _tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


def _include(value: Any) -> Any:
    if value in (None, []):
        return value
    if not isinstance(value, list) or any(name != "reasoning.encrypted_content" for name in value):
        raise ValueError('only "reasoning.encrypted_content" is accepted; reasoning is returned in plain text')
    return value


def _object(*others: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "object"}, *others, {"type": "null"}]})


_LIST = {"type": "array", "items": {"type": "object"}}


class ResponseRequest(SamplingNumbers, OpenAIFields):
    """Body of /v1/responses."""

    model_config = ConfigDict(extra="ignore")

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(_input),
        WithJsonSchema({"anyOf": [{"type": "string"}, {**_LIST, "minItems": 1}]}),
    ]
    instructions: String | None = None
    max_output_tokens: Integer | None = None
    text: Annotated[Any, PlainValidator(_text_config), _object()] = Field(None, description="`verbosity` only `medium`")
    reasoning: Annotated[Any, PlainValidator(_reasoning), _object()] = Field(
        None, description="in responses, `effort` is honoured; summaries are not built, reasoning is returned in full"
    )
    tools: Annotated[Any, PlainValidator(_tools), WithJsonSchema({"anyOf": [_LIST, {"type": "null"}]})] = Field(
        None, description="functions only"
    )
    tool_choice: Annotated[Any, PlainValidator(_tool_choice), _object({"enum": ["none", "auto", "required"]})] = None
    include: Annotated[Any, PlainValidator(_include)] = Field(
        None, description="only `reasoning.encrypted_content`; reasoning is returned in plain text"
    )
    stream: Boolean | None = None
    model: String | None = None
    parallel_tool_calls: Boolean | None = None
    metadata: dict[str, Any] | None = Field(None, description="responses repeat it; it is not stored")
    user: Any = ignored("it names the end user, for abuse reports")

    logit_bias: Any = None
    seed: Any = None
    stop: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    structured_outputs: Any = None
    priority: Any = None
    timeout: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None
    include_reasoning: Any = None

    store: Any = refused("nothing is stored", False)
    background: Any = refused(_NOT_STORED, False)
    conversation: Any = refused(_NOT_STORED)
    previous_response_id: Any = refused(_NOT_STORED)
    prompt: Any = refused("prompt templates are not stored; send their text")
    context_management: Any = refused("input is never shortened", [])
    truncation: Any = refused("input is never shortened", "disabled", choices=("auto", "disabled"))
    max_tool_calls: Any = ignored("it limits built-in tools, and there are none")
    stream_options: Any = ignored("events are not padded")
    top_logprobs: Any = refused("use /v1/chat/completions for logprobs", 0)

    def chat(self) -> ChatRequest:
        """Return the chat completion that this request stands for.

        Its functions are strict unless they say otherwise.

        Raises:
            RequestError: names the field that is invalid.
        """
        messages = self.input
        if self.instructions is not None:
            # Templates accept one system message, at the beginning.
            first = messages[0] if messages[0]["role"] in ("system", "developer") else None
            both = self.instructions if first is None else f"{self.instructions}\n\n{first['content']}"
            messages = [{"role": "system", "content": both}, *messages[first is not None :]]
        fields = {name: getattr(self, name) for name in _PASSED}
        fields |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text,
            "reasoning_effort": self.reasoning,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
        }
        try:
            chat = ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            first_error = error.errors()[0]
            name, *rest = map(str, first_error["loc"])
            param = ".".join((ALIASES.get(name, name), *rest))
            raise RequestError(f"{param}: {first_error['msg'].removeprefix('Value error, ')}", param) from None
        return chat.with_strict_functions()
