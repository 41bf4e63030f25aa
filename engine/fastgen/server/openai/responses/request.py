"""The request body of /v1/responses, and its conversion to a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationError

from fastgen.server.openai.fields.messages import TextContent, with_text
from fastgen.server.openai.fields.types import Boolean, Integer, String, field_error
from fastgen.server.openai.fields.unsupported import OpenAIFields, ignored, refused
from fastgen.server.openai.generation_request import ChatRequest, SamplingNumbers
from fastgen.server.openai.responses.input_items import messages_of

_NOT_STORED = "nothing is stored; send the whole input"
# Names of fields here by their name in a chat completion or in an engine request.
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
        raise ValueError("must be a string, or a list of input items that is not empty")
    return messages_of(value)


def _text_format(value: Any) -> Any:
    """Return `text.format`."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if value.get("verbosity") not in (None, "medium"):
        raise ValueError('verbosity is not supported; leave it out or set it to "medium"')
    return value.get("format")


def _reasoning(value: Any) -> str | None:
    """Return `reasoning.effort`."""
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
    """Return the functions of the tools, without null fields."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("must be a list of tools")
    for tool in value:
        if tool.get("type") != "function":
            raise ValueError(f"{str(tool.get('type'))[:40]!r} is not supported; functions are the only kind of tools")
        if not isinstance(tool.get("name"), str):
            raise ValueError("each function must have a name")
    return [{name: item for name, item in tool.items() if name != "type" and item is not None} for tool in value]


def _tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return {"type": "allowed_tools", "mode": mode, "tools": [_allowed_tool(tool) for tool in tools]}
        case {"type": "allowed_tools"}:
            raise ValueError('allowed_tools must have "mode": "auto" or "required", and "tools": [...]')
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )


def _allowed_tool(tool: Any) -> dict[str, str]:
    match tool:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "name": name}
    raise ValueError('each allowed tool must be {"type": "function", "name": ...}')


def _chat_tool_choice(choice: Any) -> Any:
    """Return the choice as in chat completions, which nest the fields of a choice and of a function."""
    match choice:
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            nested = [{"type": "function", "function": tool} for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}
        case {"type": "function"}:
            return {"type": "function", "function": choice}
    return choice


def _include(value: Any) -> Any:
    if value in (None, []):
        return value
    if not isinstance(value, list) or any(name != "reasoning.encrypted_content" for name in value):
        raise ValueError('only "reasoning.encrypted_content" is accepted; reasoning is returned in plain text')
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    """Return `metadata` within OpenAI's limits, because responses repeat it."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise ValueError("must be an object with at most 16 keys")
    for key, item in value.items():
        if len(key) > 64 or not isinstance(item, str) or len(item) > 512:
            raise ValueError(f"{key[:64]!r}: keys have at most 64 characters, and values are strings of at most 512")
    return value


_Object = dict[str, Any]
_ToolChoice = _Object | Literal["none", "auto", "required"] | None


class _PassedFields(SamplingNumbers):
    """Fields with the same name and meaning as in chat completions, where they are validated."""

    model: String | None = None
    stream: Boolean | None = None
    parallel_tool_calls: Boolean | None = None
    logit_bias: Any = None
    seed: Any = None
    receipt: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    no_stop_trim: Any = None
    skip_special_tokens: Any = None
    structured_outputs: Any = None
    priority: Any = None
    timeout: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None
    include_reasoning: Any = None


class _Chat(ChatRequest):
    is_strict_by_default = True


_STRUCTURED, _IN_CHAT = "in responses, use text.format or structured_outputs", "responses lack it"


class _ChatFields(BaseModel):
    """Fields of chat completions that responses lack: refused, as ignoring them would silently change the answer."""

    messages: Any = refused("in responses, use input")
    max_tokens: Any = refused("in responses, use max_output_tokens")
    max_completion_tokens: Any = refused("in responses, use max_output_tokens")
    reasoning_effort: Any = refused("in responses, use reasoning.effort")
    response_format: Any = refused(_STRUCTURED)
    guided_json: Any = refused(_STRUCTURED)
    guided_regex: Any = refused(_STRUCTURED)
    guided_choice: Any = refused(_STRUCTURED)
    guided_grammar: Any = refused(_STRUCTURED)
    json_schema: Any = refused(_STRUCTURED)
    regex: Any = refused(_STRUCTURED)
    ebnf: Any = refused(_STRUCTURED)
    allowed_token_ids: Any = refused(_IN_CHAT)
    bad_words: Any = refused(_IN_CHAT)
    n: Any = refused(_IN_CHAT, 1)
    logprobs: Any = refused(_IN_CHAT, False)
    prompt_logprobs: Any = refused(_IN_CHAT)
    return_token_ids: Any = refused(_IN_CHAT, False)
    return_tokens_as_token_ids: Any = refused(_IN_CHAT, False)
    truncate_prompt_tokens: Any = refused(_IN_CHAT)
    truncation_side: Any = refused(_IN_CHAT)
    add_generation_prompt: Any = refused(_IN_CHAT, True)
    add_special_tokens: Any = refused(_IN_CHAT, False)
    continue_final_message: Any = refused(_IN_CHAT, False)
    chat_template: Any = refused(_IN_CHAT)
    documents: Any = refused(_IN_CHAT, [])


class ResponseRequest(_PassedFields, _ChatFields, OpenAIFields):
    """Body of /v1/responses."""

    input: Annotated[
        list[_Object],
        PlainValidator(_input, json_schema_input_type=str | Annotated[list[_Object], Field(min_length=1)]),
    ]
    instructions: String | None = None
    max_output_tokens: Integer | None = None
    text: Annotated[Any, PlainValidator(_text_format, json_schema_input_type=_Object | None)] = Field(
        None, description="`verbosity` only `medium`"
    )
    reasoning: Annotated[Any, PlainValidator(_reasoning, json_schema_input_type=_Object | None)] = Field(
        None, description="in responses, `effort` only; reasoning is returned in full instead of summaries"
    )
    tools: Annotated[Any, PlainValidator(_tools, json_schema_input_type=list[_Object] | None)] = Field(
        None, description="functions only"
    )
    tool_choice: Annotated[Any, PlainValidator(_tool_choice, json_schema_input_type=_ToolChoice)] = None
    include: Annotated[Any, PlainValidator(_include)] = Field(
        None, description="only `reasoning.encrypted_content`; reasoning is returned in plain text"
    )
    metadata: Annotated[_Object | None, PlainValidator(_metadata, json_schema_input_type=_Object | None)] = Field(
        None, description="responses repeat it; it is not stored"
    )

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
        """Return the equivalent chat completion request. Its functions are strict by default, where that is possible.

        Raises:
            RequestError: if a field is invalid; names it.
        """
        messages = self.input
        if self.instructions is not None:
            # Templates accept one system message, at the beginning.
            first = messages[0] if messages[0]["role"] in ("system", "developer") else None
            both: TextContent = self.instructions
            if first is not None:
                both = with_text(first["content"], before=f"{self.instructions}\n\n")
            messages = [{"role": "system", "content": both}, *messages[first is not None :]]
        # Chat completions nest functions and schemas.
        response_format = self.text
        if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
            response_format = {"type": "json_schema", "json_schema": response_format}
        fields = {
            **{name: getattr(self, name) for name in _PassedFields.model_fields},
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": response_format,
            "reasoning_effort": self.reasoning,
            "tools": [{"type": "function", "function": function} for function in self.tools or []],
            "tool_choice": _chat_tool_choice(self.tool_choice),
        }
        try:
            return _Chat.model_validate(fields)
        except ValidationError as error:
            first_error = error.errors()[0]
            name, *rest = map(str, first_error["loc"])
            param = ".".join((ALIASES.get(name, name), *rest))
            raise field_error(param, first_error["msg"].removeprefix("Value error, ")) from None
