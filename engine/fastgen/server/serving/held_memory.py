"""Memory that requests hold while they are open: the tokens of their prompts, and log-probabilities.

Both are bounded for each request, by name, and for all requests of a process together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import Request, RequestError
from fastgen.server.http.errors import APIError

# Token ids of all generations of a request: 128 choices of 32,768 tokens.
_MOST_PROMPT_TOKENS = 1 << 22
# Log-probabilities of a request: those of its prompts, and those of its generations.
MOST_LOGPROBS_HELD = 1 << 18
_MOST_STREAMED_LOGPROBS = 1 << 15
# Bytes of a token in the lists of both processes, and of one token's log-probability until the response is written.
_TOKEN_BYTES = 80
_LOGPROB_BYTES = 250
_RETRY_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a request's generations hold at most.

    Attributes:
        prompt_tokens: token ids of the prompts; each generation has its own.
        prompt_logprobs: log-probabilities of the prompts, alternatives included.
        logprobs: log-probabilities of the generated tokens, alternatives included.
    """

    prompt_tokens: int
    prompt_logprobs: int
    logprobs: int

    @classmethod
    def of(cls, requests: Sequence[Request], num_candidates: int) -> Holdings:
        """Return the holdings of `num_candidates` generations of each request."""
        prompt_tokens = prompt_logprobs = logprobs = 0
        for request in requests:
            length, sampling = len(request.prompt_token_ids), request.sampling
            prompt_tokens += length * num_candidates
            if sampling.prompt_logprobs is not None:
                prompt_logprobs += length * (1 + sampling.prompt_logprobs) * num_candidates
            if sampling.logprobs is not None:
                logprobs += sampling.max_tokens * (1 + sampling.logprobs) * num_candidates
        return cls(prompt_tokens, prompt_logprobs, logprobs)

    @property
    def num_bytes(self) -> int:
        """Memory, roughly."""
        return self.prompt_tokens * _TOKEN_BYTES + (self.prompt_logprobs + self.logprobs) * _LOGPROB_BYTES

    def check(self) -> None:
        """Raise RequestError if one request may not hold so much; names the field and the limit."""
        for found, most, param, what, remedy in (
            (self.prompt_tokens, _MOST_PROMPT_TOKENS, "prompt", "prompt tokens in all choices", "lower n"),
            (self.prompt_logprobs, MOST_LOGPROBS_HELD, "prompt_logprobs", "log-probabilities of prompts", "lower it"),
            (self.logprobs, MOST_LOGPROBS_HELD, "logprobs", "log-probabilities", "lower it, n or max_tokens"),
        ):
            if found > most:
                raise RequestError(
                    f"{param}: {found} {what}; one request may have at most {most}: {remedy}, or send several requests",
                    param,
                )


def check_streamed_prompts(requests: Sequence[Request]) -> None:
    """Raise RequestError if the first chunks of a stream have too many log-probabilities of prompts.

    Chunks are written in the event loop, other responses in a thread.
    """
    found = Holdings.of(requests, 1).prompt_logprobs
    if found > _MOST_STREAMED_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs: {found} log-probabilities of prompts; a stream may have at most "
            f"{_MOST_STREAMED_LOGPROBS}: lower it, or set stream to false",
            "prompt_logprobs",
        )


def most_logprob_tokens(num_logprobs: int | None, num_generations: int) -> float:
    """Return how many tokens each generation of a request may have with log-probabilities."""
    if num_logprobs is None:
        return float("inf")
    return max(1, MOST_LOGPROBS_HELD // (num_generations * (1 + max(0, num_logprobs))))


class HeldMemory:
    """The memory that all requests of a process hold, bounded.

    Args:
        max_bytes: of all requests together. One request alone is always admitted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count the memory of a request that is about to be sent to the engine.

        Raises:
            APIError: 503 if all requests together would hold too much.
        """
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise APIError(
                503,
                "the prompts and log-probabilities of all requests together take too much memory; try again later",
                code="memory_full",
                retry_after=_RETRY_SECONDS,
            )
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting the memory of a request that has ended."""
        self.num_bytes -= num_bytes
