"""What clients get: OpenAI's objects, encoded by msgspec because there is one for every token of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from fastgen.version import VERSION

FINGERPRINT = f"fastgen-{VERSION}"


class PromptTokensDetails(Struct, frozen=True):
    """How much of the prompts came from the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens read and written. A prompt with several answers is read once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: None = None


class PromptLogprob(Struct, frozen=True):
    """One candidate for a place in the prompt, as vLLM tells it."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id, for each prompt token; None for the first, which nothing comes before.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct, frozen=True):
    """Of each token: its text, where that begins in the choice's text, and how likely it and its rivals were."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One prompt's continuation, or the next piece of it."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """The response of /v1/completions, or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = FINGERPRINT


class TopLogprob(Struct, frozen=True):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A token and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of each token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True, omit_defaults=True):
    """A call, or the next piece of it: the name comes with the first one."""

    arguments: str
    name: str | None = None


class ToolCall(Struct, frozen=True):
    """A call that the model wants made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(Struct, frozen=True, omit_defaults=True):
    """What a call grew by; `id` and `type` come with the first piece."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class AssistantMessage(Struct, frozen=True):
    """What the model said."""

    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """The model's answer."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(Struct, frozen=True):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = FINGERPRINT
    service_tier: None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """What an answer grew by."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct, frozen=True):
    """The next piece of the answer."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = FINGERPRINT


class ModelCard(Struct, frozen=True):
    """A name that requests may use."""

    id: str
    created: int
    max_model_len: int  # as other servers spell it; clients look for it
    owned_by: str = "fastgen"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    """The response of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
