"""The fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fastgen.core.request import Grammar, RequestError, SamplingParams
from fastgen.server.openai.field_types import (
    BadWords,
    Biases,
    FalseOnly,
    NoneOfThem,
    NotServed,
    Number,
    StopStrings,
    Switch,
    Text,
    TokenList,
    Whole,
)
from fastgen.server.openai.structured_outputs import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from fastgen.server.serving.service import Terms
from fastgen.text.output import TextRules

MOST_CHOICES = 128
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
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
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

    def check(self) -> None:
        """Raises RequestError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: goes with stream set to true; leave it out", "stream_options")

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
            "seed": _seed(self.seed),
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "prompt_logprobs": self.prompt_logprobs,
            **further,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens, logit_bias=self.logit_bias, stop_token_ids=self.stop_token_ids, **chosen
        )


def _seed(given: int | None) -> int | None:
    """The engine's seed. OpenAI's may be negative; -1 is how vLLM's users ask for another one each time."""
    return None if given in (None, -1) else given & (1 << 63) - 1
