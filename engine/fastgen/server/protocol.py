"""What clients may ask for: the fields of OpenAI's completions and chat completions, and those that vLLM's users know.

A field that is known elsewhere but whose behaviour is not built here is refused unless it holds the value that changes
nothing: to ignore it would give an answer other than the one asked for. Fields that nobody knows are ignored, as OpenAI
does.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fastgen.core.request import Grammar, RequestError, SamplingParams
from fastgen.server.conversation import Message, Tool, ToolChoice
from fastgen.server.fields import (
    BadWords,
    Biases,
    Empty,
    FalseOnly,
    NoCall,
    NoneOfThem,
    NotServed,
    Number,
    Prompts,
    StopStrings,
    Switch,
    Text,
    TokenList,
    Whole,
)
from fastgen.server.service import Terms
from fastgen.server.structure import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from fastgen.text.output import TextRules

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_MOST_CHOICES = 128
_STRUCTURES = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: Switch | None = None
    continuous_usage_stats: Switch | None = None


class Generation(BaseModel):
    """The fields that both endpoints have."""

    model_config = ConfigDict(extra="ignore")

    model: Text | None = None
    n: Annotated[Whole, Field(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases = ()
    bad_words: BadWords = ()
    seed: Whole | None = None
    stop: StopStrings = ()
    stop_token_ids: TokenList = ()
    include_stop_str_in_output: Switch | None = None
    skip_special_tokens: Switch | None = None
    ignore_eos: Switch | None = None
    prompt_logprobs: Whole | None = None
    return_tokens_as_token_ids: Switch | None = None
    add_special_tokens: Switch | None = None

    stream: Switch | None = None
    stream_options: StreamOptions | None = None
    priority: Whole | None = None
    timeout: Number | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None

    response_format: ResponseFormat = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    structured_outputs: StructuredOutputs = None

    guided_whitespace_pattern: NotServed = None
    use_beam_search: FalseOnly = None
    allowed_token_ids: NoneOfThem = None
    truncate_prompt_tokens: NotServed = None
    logits_processors: NoneOfThem = None

    @property
    def num_choices(self) -> int:
        """Answers to give for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Shall a stream end with the usage?"""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Shall each piece of a stream say the usage so far?"""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def structure(self) -> tuple[Grammar, str] | None:
        """The grammar that the answer must match, and the field that asks for it.

        Raises:
            RequestError: when two fields ask for one.
        """
        asked = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(asked) > 1:
            raise RequestError(f"{asked[1]}: {asked[0]} asks for another structure already; keep one", asked[1])
        return (getattr(self, asked[0]), asked[0]) if asked else None

    def terms(self) -> Terms:
        """On what terms the engine is to take it."""
        return Terms(priority=self.priority or 0, deadline_seconds=self.timeout, cache_salt=self.cache_salt or "")

    def text_rules(self, shown_tokens: frozenset[int] = frozenset()) -> TextRules:
        """How tokens become text; `shown_tokens` are marks that the server itself reads."""
        return TextRules(
            stop=self.stop,
            include_stop=bool(self.include_stop_str_in_output),
            min_tokens=self.min_tokens or 0,
            skip_special_tokens=self.skip_special_tokens is not False,
            shown_tokens=shown_tokens,
        )

    def sampling(self, max_tokens: int, **further: Any) -> SamplingParams:
        """The engine's parameters, OpenAI's defaults filled in; `further` are those that this class does not know.

        Raises:
            RequestError: when a value is out of range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            # -1 is how others spell "off"
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "prompt_logprobs": self.prompt_logprobs,
            **further,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens, logit_bias=self.logit_bias, stop_token_ids=self.stop_token_ids, **chosen
        )


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[Whole, Field(ge=1, le=_MOST_CHOICES)] | None = None
    echo: Switch | None = None
    logprobs: Whole | None = None
    suffix: Empty = None

    @property
    def scores_only(self) -> bool:
        """Is it the prompt's log-probabilities alone that are wanted? Evaluation harnesses ask so."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def num_candidates(self) -> int:
        """Generations to run for each prompt."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def aliases(self) -> dict[str, str]:
        """What the engine's parameters are called here."""
        return {"deadline_seconds": "timeout"} | (
            {} if self.prompt_logprobs is not None else {"prompt_logprobs": "logprobs"}
        )

    def token_limit(self, room: int) -> int:
        """Most tokens to generate where the model's length leaves `room` after the prompt."""
        if self.scores_only:
            return 1  # the engine's least; it is dropped
        return self.max_tokens if self.max_tokens is not None else max(1, min(_DEFAULT_COMPLETION_TOKENS, room))

    def check(self) -> None:
        """Raises RequestError where fields contradict each other."""
        if self.num_candidates < self.num_choices:
            raise RequestError(
                f"best_of is {self.best_of}: it must be at least n, which is {self.num_choices}", "best_of"
            )
        if self.stream and self.num_candidates > self.num_choices:
            raise RequestError("best_of: the best is known at the end only; set it to n, or stream to false", "best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: not in streams; use echo with logprobs, or no stream", "prompt_logprobs"
            )


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: Switch | None = None
    top_logprobs: Whole | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Switch | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Switch | None = None
    continue_final_message: Switch | None = None
    documents: list[dict[str, Any]] | None = None

    functions: NoneOfThem = None
    function_call: NoCall = None
    chat_template: NotServed = None
    echo: FalseOnly = None

    @property
    def aliases(self) -> dict[str, str]:
        """What the engine's parameters are called here."""
        names = {"deadline_seconds": "timeout", "logprobs": "top_logprobs", "prompt": "messages"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to show beside each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues(self) -> bool:
        """Is the last message to be gone on with, instead of answered?"""
        return bool(self.continue_final_message)

    @property
    def opens_answer(self) -> bool:
        """Does the prompt end with what opens an answer?"""
        return not self.continues if self.add_generation_prompt is None else self.add_generation_prompt

    def token_limit(self, room: int) -> int:
        """Most tokens to generate where the model's length leaves `room` after the prompt: all of it by default."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return limit if limit is not None else max(1, room)

    def check(self) -> None:
        """Raises RequestError where fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.continues and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message: add_generation_prompt would end the message; leave one of them out",
                "continue_final_message",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs: not in streams; leave out one of the two", "prompt_logprobs")
