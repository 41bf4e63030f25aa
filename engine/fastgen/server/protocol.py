"""What clients may ask for: the fields of OpenAI's completions and chat completions, and a few that others know.

A field that is known elsewhere but whose behaviour is not built here is refused unless it holds the value that changes
nothing: to ignore it would give an answer other than the one asked for. Fields that nobody knows are ignored, as OpenAI
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fastgen.core.request import SamplingParams

_MOST_STOPS = 16
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def _only(*neutral: object) -> Callable[[Any], Any]:
    """A check that lets through None and the values that change nothing; the first of them is named as the remedy."""
    remedy = f"leave it out or set it to {neutral[0]!r}" if neutral else "leave it out"

    def check(value: Any) -> Any:
        if value is None or any(value == same and type(value) is type(same) for same in neutral):
            return value
        raise ValueError(f"this value is not served: {remedy}")

    return check


_NotServed = Annotated[Any, AfterValidator(_only())]
_NoneOfThem = Annotated[Any, AfterValidator(_only([], {}))]
_One = Annotated[Any, AfterValidator(_only(1))]
_Zero = Annotated[Any, AfterValidator(_only(0, 0.0))]
_OneExactly = Annotated[Any, AfterValidator(_only(1, 1.0))]
_False = Annotated[Any, AfterValidator(_only(False))]
_Empty = Annotated[Any, AfterValidator(_only(""))]
_Text = Annotated[Any, AfterValidator(_only({"type": "text"}))]
_NoTool = Annotated[Any, AfterValidator(_only("none", "auto"))]


def _stop_list(value: str | list[str] | None) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"has {len(stops)} strings; at most {_MOST_STOPS} are taken")
    if not all(stops):
        raise ValueError("holds an empty string; leave it out")
    return stops


_Stop = Annotated[str | list[str] | None, AfterValidator(_stop_list)]


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool = False


class _Generation(BaseModel):
    """The fields that both endpoints have."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: _Stop = Field(default=None, validate_default=True)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: _One = None
    logit_bias: _NoneOfThem = None
    presence_penalty: _Zero = None
    frequency_penalty: _Zero = None
    repetition_penalty: _OneExactly = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return self.stop  # type: ignore[return-value]  # what the validator made of it

    @property
    def include_usage(self) -> bool:
        """Shall a stream end with the usage?"""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters, OpenAI's defaults filled in.

        Raises:
            RequestError: when a value is out of range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            # -1 is how others spell "off"
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, **chosen)


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list of texts and token lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError("give a text, a list of texts, a list of token ids, or a list of lists of token ids")


class CompletionRequest(_Generation):
    """The body of /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompts)]

    best_of: _One = None
    echo: _False = None
    logprobs: _NotServed = None
    suffix: _Empty = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts and token lists to continue, each on its own."""
        return self.prompt  # type: ignore[no-any-return]  # what the validator made of it

    def token_limit(self, room: int) -> int:
        """Most tokens to generate where the model's length leaves `room` after the prompt."""
        return self.max_tokens if self.max_tokens is not None else max(1, min(_DEFAULT_COMPLETION_TOKENS, room))


class TextPart(BaseModel):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; what else a client puts in it is for the model's template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates expect it: content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content or "", **(self.__pydantic_extra__ or {})}


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None

    logprobs: _False = None
    top_logprobs: _NotServed = None
    tools: _NoneOfThem = None
    tool_choice: _NoTool = None
    functions: _NoneOfThem = None
    function_call: _NoTool = None
    response_format: _Text = None

    def token_limit(self, room: int) -> int:
        """Most tokens to generate where the model's length leaves `room` after the prompt: all of it by default."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return limit if limit is not None else max(1, room)
