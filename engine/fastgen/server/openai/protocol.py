"""What clients may ask for: the fields of OpenAI's completions and chat completions, and those that vLLM's users know.

A field that is known elsewhere but whose behaviour is not built here is refused unless it holds the value that changes
nothing: to ignore it would give an answer other than the one asked for. Fields that nobody knows are ignored, as OpenAI
does.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from fastgen.core.request import RequestError
from fastgen.server.openai.field_types import Empty, FalseOnly, NoCall, NoneOfThem, NotServed, Prompts, Switch, Whole
from fastgen.server.openai.messages import Message, Tool, ToolChoice
from fastgen.server.openai.shared_fields import MOST_CHOICES, Generation

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
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
        super().check()
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
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.continues and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message: add_generation_prompt would end the message; leave one of them out",
                "continue_final_message",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs: not in streams; leave out one of the two", "prompt_logprobs")
