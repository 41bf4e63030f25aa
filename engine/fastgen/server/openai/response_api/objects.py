"""Bodies of /v1/responses in OpenAI's format."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fastgen.server.openai.response_api.request import ResponseRequest
from fastgen.server.openai.responses import ChatChoice, CompletionUsage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputText(Struct, frozen=True, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    """A message of the model."""

    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """The model's reasoning."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[None] = []


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True):
    """Input tokens that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    """Number of generated tokens that belong to the reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: CompletionUsage) -> ResponseUsage:
        """Return the usage of a chat completion in this format."""
        details = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(0 if isinstance(details, UnsetType) else details.reasoning_tokens),
            usage.total_tokens,
        )


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class Response(Struct, frozen=True):
    """A response; the request's settings are repeated in it."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[Item]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: Any
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    object: Literal["response"] = "response"
    background: bool = False
    store: bool = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: int = 0
    completed_at: int | UnsetType | None = UNSET


def new_id(prefix: str) -> str:
    """Return a new id of an item."""
    return f"{prefix}_{secrets.token_hex(16)}"


def response(
    body: ResponseRequest,
    response_id: str,
    created: int,
    model: str,
    sampling: dict[str, float],
    strict: Mapping[str, bool],
) -> Response:
    """Return the response to `body` before its generation has begun.

    Args:
        body: the request.
        response_id: id of the response.
        created: when it was created, in Unix seconds.
        model: name of the model.
        sampling: its temperature and top_p.
        strict: whether calls of a function must match its schema, by name.
    """
    return Response(
        id=response_id,
        created_at=created,
        model=model,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        tool_choice=_flat_choice(body.tool_choice),
        tools=[_flat_tool(tool["function"], strict) for tool in body.tools or []],
        text={"format": _flat_format(body.text)},
        reasoning={"effort": body.reasoning, "summary": None},
    )


def _flat_tool(function: dict[str, Any], strict: Mapping[str, bool]) -> dict[str, Any]:
    return {"strict": strict.get(function["name"], True), "parameters": None, **function, "type": "function"}


def _flat_choice(choice: Any) -> Any:
    return {"type": "function", "name": choice["function"]["name"]} if isinstance(choice, dict) else choice or "auto"


def _flat_format(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {"type": "text"}
    described = given.get("json_schema")
    return given if described is None else {"name": "schema", **described, "type": "json_schema"}


def status_of(finish_reason: str | None) -> tuple[Status, IncompleteDetails | None]:
    """Return a response's status and why it is incomplete, if it is."""
    if finish_reason == "length":
        return "incomplete", IncompleteDetails("max_output_tokens")
    return ("cancelled", None) if finish_reason == "abort" else ("completed", None)


def items_of(choice: ChatChoice) -> list[Item]:
    """Return the output items of a complete chat choice: reasoning, message, function calls.

    If the generation was cut short, the last item is incomplete.
    """
    message, items = choice.message, list[Item]()
    if not isinstance(message.reasoning, UnsetType):
        items.append(ReasoningItem(new_id("rs"), [ReasoningText(message.reasoning)], "completed"))
    if message.content:
        items.append(MessageItem(new_id("msg"), [OutputText(message.content)], "completed"))
    for call in () if isinstance(message.tool_calls, UnsetType) else message.tool_calls:
        name = call.function.name or ""
        items.append(FunctionCallItem(new_id("fc"), call.id, name, call.function.arguments, "completed"))
    if items and choice.finish_reason not in ("stop", "tool_calls"):
        items[-1] = msgspec.structs.replace(items[-1], status="incomplete")
    return items
