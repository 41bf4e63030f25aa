"""What clients get: OpenAI's objects, encoded by msgspec because there is one for every token of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct, frozen=True):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Struct, frozen=True):
    """One prompt's continuation, or the next piece of it."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class Completion(Struct, frozen=True):
    """The response of /v1/completions, or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class AssistantMessage(Struct, frozen=True):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(Struct, frozen=True):
    """The model's answer."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: None = None


class ChatCompletion(Struct, frozen=True):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, frozen=True, omit_defaults=True):
    """What an answer grew by."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, frozen=True):
    """The next piece of the answer."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None = None


class ChatChunk(Struct, frozen=True):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


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
