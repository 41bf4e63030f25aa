"""What is made of each request to the engine: pieces of a choice as they come, then a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastgen.core.request import FinishReason, Request
from fastgen.core.step_output import TokenLogprobs
from fastgen.engine.messages import TokenOutput
from fastgen.text.output import OutputText, TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the generations of one HTTP request become its choices.

    Attributes:
        num_choices: answers to give for each prompt.
        num_candidates: generations to run for each prompt; the likeliest of them are the answers.
        text: how tokens become text.
        scores_only: is only the prompt's likelihood wanted, and nothing of what follows it?
    """

    num_choices: int = 1
    num_candidates: int = 1
    text: TextRules = field(default_factory=TextRules)
    scores_only: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a choice.

    Attributes:
        logprobs: of the tokens that this piece is made of, where they were asked for.
        finish_reason: in OpenAI's words, on the last piece; `stop_reason` then tells what stopped it, if the client
            named it.
    """

    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Generation:
    """What became of one request to the engine so far."""

    request: Request
    output: OutputText
    first_token_seconds: float | None = None
    queue_seconds: float | None = None
    finish_reason: FinishReason | None = None
    last_token: int | None = None
    cached_tokens: int = 0
    logprob_sum: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    unshown_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, got: TokenOutput) -> Piece | None:
        """Takes in what the engine gave; returns what there is to show of it."""
        before = self.output.num_tokens
        delta = self.output.push(got.token_ids, got.finish_reason)
        self.finish_reason = delta.finish_reason
        if got.token_ids:
            self.last_token = got.token_ids[-1]
        if got.prompt_logprobs:
            self.prompt_logprobs += got.prompt_logprobs
        if got.logprobs:
            counted = got.logprobs[: self.output.num_tokens - before]
            self.logprob_sum += sum(entry.logprob for entry in counted)
            self.unshown_logprobs += counted
        if not delta.text and delta.finish_reason is None:
            return None
        logprobs, self.unshown_logprobs = self.unshown_logprobs, []
        if delta.finish_reason is None:
            return Piece(delta.text, logprobs)
        return Piece(delta.text, logprobs, _told(delta.finish_reason), self._stop_reason())

    @property
    def mean_logprob(self) -> float:
        """By which the best of several is chosen: the sum alone would prefer short ones."""
        return self.logprob_sum / max(1, self.output.num_tokens)

    @property
    def missed_deadline(self) -> bool:
        """Did its deadline pass before there was anything?"""
        return self.finish_reason is FinishReason.DEADLINE and self.output.num_tokens == 0

    def _stop_reason(self) -> str | int | None:
        if self.output.stop_string is not None:
            return self.output.stop_string
        stopped = self.finish_reason is FinishReason.STOP and self.last_token in self.request.sampling.stop_token_ids
        return self.last_token if stopped else None


def _told(reason: FinishReason) -> str:
    return FinishReason.ABORT.value if reason is FinishReason.DEADLINE else reason.value


@dataclass(slots=True)
class Answer:
    """A whole choice."""

    index: int
    generation: Generation
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str
    stop_reason: str | int | None
