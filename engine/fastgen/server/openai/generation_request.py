"""Request bodies of /v1/completions and /v1/chat/completions: OpenAI's fields and extensions of vLLM and SGLang.

Fields that are not implemented are in `fields/unsupported.py`.

To add a sampling parameter, add it to `SamplingParams` and, under the same name, to `GenerationRequest`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from fastgen.core.request import Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.openai.base_request import BaseRequest
from fastgen.server.openai.fields.messages import Messages, Tool, ToolChoice, ToolChoiceField
from fastgen.server.openai.fields.structured_outputs import StructureFields
from fastgen.server.openai.fields.types import (
    BadWords,
    Boolean,
    Integer,
    LogitBias,
    Number,
    Prompts,
    ReasoningEffort,
    Seed,
    Stops,
    String,
    ThinkingBudget,
    TokenIdTuple,
    TopK,
    TruncationLimit,
    TruncationSide,
    field_error,
)
from fastgen.server.openai.fields.unsupported import ChatFields, ExtensionFields, OpenAIFields, refused
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.rendered_request import RenderedRequest

_MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: Boolean | None = None
    continuous_usage_stats: Boolean | None = None


class SamplingNumbers(BaseModel):
    """Sampling parameters with the same name and meaning in all endpoints that generate."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: TopK | None = Field(None, description="-1 and 0 keep all")
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None


class GenerationRequest(SamplingNumbers, StructureFields, ExtensionFields, BaseRequest):
    """Fields that completions and chat completions share."""

    n: Annotated[Integer, Field(ge=1, le=_MAX_CHOICES)] | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    logit_bias: LogitBias = ()
    bad_words: BadWords = ()
    seed: Seed | None = Field(None, description="-1 is random")
    stop: Stops = ()
    stop_token_ids: TokenIdTuple = ()
    include_stop_str_in_output: Boolean | None = None
    no_stop_trim: Boolean | None = Field(None, description="the same as `include_stop_str_in_output`")
    skip_special_tokens: Boolean | None = None
    ignore_eos: Boolean | None = None
    prompt_logprobs: Integer | None = None
    return_tokens_as_token_ids: Boolean | None = None
    return_token_ids: Boolean | None = Field(None, description="adds `prompt_token_ids` and `token_ids`")
    receipt: Boolean | None = Field(
        None, description="adds a receipt, with which `fastgen verify` computes the answer again on another machine"
    )
    add_special_tokens: Boolean | None = None
    truncate_prompt_tokens: TruncationLimit | None = Field(
        None, description="-1 keeps what fits with `max_tokens`; the end of the prompt is kept, and `echo` returns that"
    )
    truncation_side: TruncationSide = Field(None, description="`right` keeps the start")

    stream: Boolean | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Return whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every chunk of the stream carries the usage so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raise RequestError if fields contradict each other, or a sampling parameter is out of range."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "requires stream to be true; leave it out")
        self.sampling(max(1, self.min_tokens or 1))  # the limit is checked when the prompt is known

    @property
    def num_candidates(self) -> int:
        """Generations per prompt."""
        return self.num_choices

    def rendered(self, requests: list[Request], **meaning: Any) -> RenderedRequest:
        """Return the `RenderedRequest` of these engine requests, one per prompt.

        `meaning` are fields of `RenderedRequest` that depend on the endpoint.
        """
        return RenderedRequest(
            requests=requests,
            num_choices=self.num_choices,
            num_candidates=self.num_candidates,
            stop=self.stop,
            include_stop=bool(self.include_stop_str_in_output or self.no_stop_trim),
            skip_special_tokens=self.skip_special_tokens is not False,
            **meaning,
        )

    def sampling(self, max_tokens: int, defaults: Mapping[str, Any] | None = None, **others: Any) -> SamplingParams:
        """Return the engine's sampling parameters; null fields get the model's `defaults` or else OpenAI's.

        Tokens that the model's defaults ban stay banned.

        Raises:
            RequestError: if a value is out of range.
        """
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | others
        given = {name: value for name, value in values.items() if value is not None}
        if self.receipt and self.seed is None:  # otherwise the engine draws one, and does not tell
            given["seed"] = secrets.randbits(63)
        defaults = defaults or {}
        banned = (*defaults.get("bad_words", ()), *given.get("bad_words", ()))
        return SamplingParams(**{**defaults, **given, "bad_words": banned, "max_tokens": max_tokens})

    def prompt_request(
        self, token_ids: list[int], model: ServedModel, default_tokens: float | None = None, **sampling: Any
    ) -> Request:
        """Return the engine's request for one prompt, truncated if requested, without an id.

        Args:
            token_ids: the prompt.
            model: the model to use.
            default_tokens: most tokens to generate if the client sets no limit; None for as many as fit.
            sampling: parameters that depend on the endpoint or the tokenizer.

        Raises:
            RequestError: if a value is out of range.
        """
        # truncate_prompt_tokens of -1 leaves room for the requested tokens, or for one token.
        longest = max(1, model.engine.info.max_model_length - max(1, self.requested_tokens or 1))
        token_ids = self.truncated(token_ids, longest)
        limit = self.token_limit(model.remaining_length(len(token_ids)), default_tokens)
        return self.engine_request(token_ids, self.sampling(limit, model.generation_defaults, **sampling))

    def token_limit(self, remaining: int, default: float | None) -> int:
        """Return the most tokens to generate: the client's limit or, without one, `default` within `remaining`.

        `remaining` is the model's length minus the prompt; without a default, it is the limit.
        """
        if self.requested_tokens is not None:
            return self.requested_tokens
        return max(1, remaining if default is None else int(min(default, remaining)))

    @property
    def requested_tokens(self) -> int | None:
        """The client's limit on generated tokens, if any."""
        return self.max_tokens


# Sampling parameters that need neither the endpoint nor the tokenizer.
_SAMPLING_FIELDS = tuple(
    parameter.name
    for parameter in fields(SamplingParams)
    if parameter.name in GenerationRequest.model_fields and parameter.name not in ("max_tokens", "bad_words")
)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[Integer, Field(ge=1, le=_MAX_CHOICES)] | None = None
    echo: Boolean | None = None
    logprobs: Integer | None = None
    suffix: Any = refused("text is only appended to the prompt", "")

    @property
    def prompt_only(self) -> bool:
        """Return whether only the prompt is requested, by `echo` without new tokens, as evaluation harnesses do."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def num_candidates(self) -> int:
        """Generations per prompt."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def aliases(self) -> dict[str, str]:
        """Field names by engine parameter, where they differ."""
        names = {"deadline_seconds": "timeout"}
        if self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        if self.logprobs is None:  # the best of several candidates is chosen by their logprobs
            names["logprobs"] = "best_of"
        return names

    @property
    def requested_tokens(self) -> int | None:
        """The client's limit on generated tokens, if any."""
        return 1 if self.prompt_only else self.max_tokens  # the engine generates at least one, which is dropped

    def check(self) -> None:
        """Raise RequestError if fields contradict each other, or a sampling parameter is out of range."""
        super().check()
        if self.receipt and self.prompt_only:
            raise field_error("receipt", "nothing is generated with max_tokens 0; set max_tokens to 1 or more")
        if self.receipt and self.num_candidates > self.num_choices:
            raise field_error("receipt", "not available with best_of above n, whose choice cannot be computed again")
        if self.num_candidates < self.num_choices:
            message = f"best_of is {self.best_of}: it must be at least n, which is {self.num_choices}"
            raise RequestError(message, "best_of")
        if self.stream and self.num_candidates > self.num_choices:
            raise field_error(
                "best_of", "a stream cannot choose the best at its end; set best_of to n, or stream to false"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise field_error(
                "prompt_logprobs", "not available in a stream; use echo with logprobs, or set stream to false"
            )


class ChatRequest(GenerationRequest, OpenAIFields, ChatFields):
    """Body of /v1/chat/completions."""

    # Whether functions without `strict` are strict where the tool format can enforce it. True for /v1/responses.
    is_strict_by_default: ClassVar[bool] = False

    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: Boolean | None = None
    top_logprobs: Integer | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceField = Field(ToolChoice(), json_schema_extra={"default": None})
    parallel_tool_calls: Boolean | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None
    reasoning_effort: ReasoningEffort = Field(
        None, description="a variable of the chat template; `none` also turns `enable_thinking` off"
    )
    include_reasoning: Boolean | None = Field(None, description="`false` leaves the reasoning out of the response")
    thinking_token_budget: ThinkingBudget | None = Field(None, description="-1 is no limit")
    documents: list[dict[str, Any]] | None = None

    chat_template: String | None = Field(None, description="requires `--trust-request-chat-template`")

    @property
    def aliases(self) -> dict[str, str]:
        """Field names by engine parameter, where they differ."""
        names = {"deadline_seconds": "timeout", "logprobs": "top_logprobs", "prompt": "messages"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to return per token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_calls(self) -> int | None:
        """Most calls per choice; None for no limit."""
        return 1 if self.tool_choice.is_single or self.parallel_tool_calls is False else None

    @property
    def opens_reply(self) -> bool:
        """Return whether the prompt ends with the header of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def requested_tokens(self) -> int | None:
        """The client's limit on generated tokens, if any."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        """Raise RequestError if fields contradict each other, or a sampling parameter is out of range."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "requires logprobs; set logprobs to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error(
                "continue_final_message", "add_generation_prompt would end the message; leave one of them out"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "not available in a stream; leave it out, or set stream to false")
