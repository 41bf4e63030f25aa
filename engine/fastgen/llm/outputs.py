"""One prompt under way in this process, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.core.request import FinishReason, Request
from fastgen.core.step_output import TokenLogprobs
from fastgen.engine.messages import TokenOutput
from fastgen.text.output import OutputText, TextDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; `cached_tokens` of the prompt's came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model made of one prompt.

    Attributes:
        text: the generation as text, without stop strings and special tokens.
        token_ids: the generated tokens, the one that ended the generation included.
        finish_reason: why it ended.
        prompt_token_ids: the prompt as the model saw it.
        logprobs: one for each of `token_ids`, where the sampling parameters ask for them.
        prompt_logprobs: one for each prompt token but the first, where they ask for them.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """Tokens read and written."""
        return Usage(len(self.prompt_token_ids), len(self.token_ids), self.cached_tokens)


class Generation:
    """Takes in what the engine gives for one request.

    Attributes:
        request: what was asked.
    """

    def __init__(self, request: Request, output: OutputText) -> None:
        self.request = request
        self._output = output
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached_tokens = 0

    def take(self, got: TokenOutput) -> TextDelta:
        """What one output adds to the text. With a stop string it may end what the engine would go on with."""
        self._token_ids += got.token_ids
        self._logprobs += got.logprobs or ()
        self._prompt_logprobs += got.prompt_logprobs or ()
        self._cached_tokens = self._cached_tokens if got.cached_tokens is None else got.cached_tokens
        delta = self._output.push(got.token_ids, got.finish_reason)
        self._pieces.append(delta.text)
        return delta

    def completion(self) -> Completion:
        """The whole, once it has ended."""
        reason = self._output.finish_reason
        assert reason is not None, "the generation has not ended"
        # A stop string may have ended the text before the last tokens that the engine gave.
        kept = self._output.num_tokens
        sampling = self.request.sampling
        return Completion(
            "".join(self._pieces),
            tuple(self._token_ids[:kept]),
            reason,
            tuple(self.request.prompt_token_ids),
            None if sampling.logprobs is None else tuple(self._logprobs[:kept]),
            None if sampling.prompt_logprobs is None else tuple(self._prompt_logprobs),
            self._cached_tokens,
        )
