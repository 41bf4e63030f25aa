"""Bodies of /v1/responses in OpenAI's format."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fastgen.receipt import Receipt
from fastgen.server.openai.response_bodies import CompletionTokensDetails, CompletionUsage
from fastgen.server.openai.responses.request import ResponseRequest
from fastgen.server.serving.request_handler import RequestHandler

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class TextPart(Struct, frozen=True, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningPart(Struct, frozen=True, tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    """A message of the model."""

    id: str
    content: list[TextPart]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """The model's reasoning."""

    id: str
    content: list[ReasoningPart]
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
    """Input tokens that came from the prefix cache. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: CompletionUsage) -> ResponseUsage:
        """Return the usage of a chat completion in this format."""
        details = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            CompletionTokensDetails(0) if isinstance(details, UnsetType) else details,
            usage.total_tokens,
        )


class IncompleteDetails(Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class ResponseBody(Struct, frozen=True):
    """A response, with the settings of its request."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
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
    receipt: Receipt | UnsetType = UNSET


def new_id(prefix: str) -> str:
    """Return a new id of an item."""
    return f"{prefix}_{secrets.token_hex(16)}"


def begun_response(body: ResponseRequest, handler: RequestHandler, name: str) -> ResponseBody:
    """Return the response of the model `name` before its generation has begun."""
    strict = {tool.name: tool.strict for tool in handler.rendered.tools}
    sampling, text_format = handler.outputs[0].request.sampling, body.text or {"type": "text"}
    if text_format["type"] == "json_schema":
        text_format = {"name": "schema", **text_format}
    return ResponseBody(
        id=handler.id.replace("resp-", "resp_", 1),
        created_at=handler.created,
        model=name,
        status="in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        tool_choice=body.tool_choice or "auto",
        tools=[
            {"strict": strict.get(function["name"], True), "parameters": None, **function, "type": "function"}
            for function in body.tools or []
        ],
        text={"format": text_format},
        reasoning={"effort": body.reasoning, "summary": None},
    )


def finished(begun: ResponseBody, usage: CompletionUsage, finish_reason: str | None) -> ResponseBody:
    """Return a response with its status and usage at the end of the generation, without its output."""
    status: ResponseStatus = "completed"
    if finish_reason in ("length", "abort"):
        status = "incomplete" if finish_reason == "length" else "cancelled"
    return msgspec.structs.replace(
        begun,
        status=status,
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        usage=ResponseUsage.of(usage),
        completed_at=int(time.time()) if status == "completed" else None,
    )
