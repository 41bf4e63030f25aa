"""Output of one request, accumulated from the engine's token outputs, in process and in the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fastgen.core.request import FinishReason, Request
from fastgen.core.step_output import TokenLogprobs
from fastgen.link.messages import TokenOutput
from fastgen.text.output_text import OutputText
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """What has been added to a request's output since the last delta was taken.

    Attributes:
        text: new text; empty while the detokenizer or a possible stop string holds it back.
        logprobs: logprobs of the tokens since the last delta that had text, if requested.
        finish_reason: set on the last delta.
        stop_reason: the stop string or stop token id that ended the request; set on the last delta.
    """

    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class RequestOutput:
    """Text, tokens, logprobs and usage of one request, so far or complete.

    `push` adds engine outputs and `take` returns what is new, so a reader that is slower than the engine gets larger
    deltas, not more of them.

    Attributes:
        token_ids: generated tokens, including the one that ended the generation.
        logprobs: one entry per token in `token_ids`; None if not requested.
        prompt_logprobs: one entry per prompt token except the first; None if not requested.
        cached_tokens: prompt tokens that came from the prefix cache.
        is_cut: whether the last `take` left a part for the next.
        queue_seconds: time in the engine's queue; None until the request is first scheduled.
        pooled: the result of a request with `pooling`, as in `TokenOutput`; None before.
    """

    __slots__ = (
        *("_num_taken_logprobs", "_num_taken_pieces", "_output", "_pieces"),
        *("cached_tokens", "is_cut", "logprobs", "pooled", "prompt_logprobs", "queue_seconds", "request", "token_ids"),
    )

    def __init__(self, request: Request, tokenizer: Tokenizer, rendered: RenderedRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.sampling.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs] | None = None if request.sampling.prompt_logprobs is None else []
        self.cached_tokens = 0
        self.is_cut = False
        self.queue_seconds: float | None = None
        self.pooled: bytes | None = None
        self._output = OutputText(tokenizer, rendered, request)
        self._pieces: list[str] = []
        self._num_taken_pieces = 0
        self._num_taken_logprobs = 0

    @property
    def has_delta(self) -> bool:
        """Whether there is new text since the last `take`, a part that it left, or the output has finished."""
        return len(self._pieces) > self._num_taken_pieces or self.is_cut or self._output.finish_reason is not None

    def push(self, output: TokenOutput) -> None:
        """Add an engine output.

        A stop string may finish the output before the engine finishes the request; tokens after it are dropped.
        """
        text = self._output.push(output.token_ids, output.finish_reason)
        kept = self._output.num_tokens - len(self.token_ids)
        if text:
            self._pieces.append(text)
        self.token_ids += output.token_ids[:kept]
        if self.logprobs is not None and output.logprobs:
            self.logprobs += output.logprobs[:kept]
        if self.prompt_logprobs is not None and output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.queue_seconds is not None:
            self.queue_seconds = output.queue_seconds
        if output.pooled is not None:
            self.pooled = output.pooled

    def take(self, most: int = sys.maxsize) -> OutputDelta:
        """Return what was added since the last call. Logprobs come with text, or at the end.

        Args:
            most: most tokens with text, and most logprobs, to return; the next call continues after them.
        """
        if not self.has_delta:
            return OutputDelta("")
        pieces = self._pieces[self._num_taken_pieces : self._num_taken_pieces + most]
        self._num_taken_pieces += len(pieces)
        self.is_cut = self._num_taken_pieces < len(self._pieces)
        logprobs: Sequence[TokenLogprobs] = ()
        if self.logprobs is not None:
            logprobs = self.logprobs[self._num_taken_logprobs : self._num_taken_logprobs + most]
            self._num_taken_logprobs += len(logprobs)
            self.is_cut = self.is_cut or self._num_taken_logprobs < len(self.logprobs)
        text, reason = "".join(pieces), self._output.finish_reason
        if self.is_cut or reason is None:
            return OutputDelta(text, logprobs)
        return OutputDelta(text, logprobs, reason, self.stop_reason)

    def as_delta(self) -> OutputDelta:
        """Return the output so far as one delta."""
        return OutputDelta(self.text, self.logprobs or (), self.finish_reason, self.stop_reason)

    @property
    def text(self) -> str:
        """Generated text, without stop strings and special tokens unless the request keeps them."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs."""
        return self._output.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id from `stop_token_ids`, that ended the generation, if one did."""
        if self._output.stop_string is not None:
            return self._output.stop_string
        stopped = self.finish_reason is FinishReason.STOP and self.token_ids
        return self.token_ids[-1] if stopped and self.token_ids[-1] in self.request.sampling.stop_token_ids else None

    @property
    def usage(self) -> Usage:
        """Tokens of this request."""
        return Usage(len(self.request.prompt_token_ids), len(self.token_ids), self.cached_tokens)
