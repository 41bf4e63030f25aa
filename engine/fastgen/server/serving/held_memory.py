"""Memory that requests hold while they are open: prompt tokens and log-probabilities.

Both are bounded for each request, with an error that names the field, and for all requests of a process together.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.core.request import Request
from fastgen.core.request_error import RequestError
from fastgen.server.http.api_error import APIError

# Token ids of all generations of a request: 128 choices of 32,768 tokens.
_MOST_PROMPT_TOKENS = 1 << 22
# Most log-probabilities of a request: of its prompts, and as many of its generations.
MOST_LOGPROBS_HELD = 1 << 18
_MOST_STREAMED_LOGPROBS = 1 << 15
# Bytes of a token in the lists of both processes, and of one token's log-probability until the response is written.
_TOKEN_BYTES = 80
_LOGPROB_BYTES = 250
_RETRY_SECONDS = 5


def held_bytes(requests: Sequence[Request], num_candidates: int) -> int:
    """Return roughly how many bytes `num_candidates` generations of each request hold at most.

    Each generation has its own copy of the prompt. Log-probabilities are counted with their alternatives.

    Raises:
        RequestError: if that is too much for one HTTP request; names the field and the limit.
    """
    prompt_tokens = num_candidates * sum(len(request.prompt_token_ids) for request in requests)
    prompt_logprobs = num_candidates * _num_prompt_logprobs(requests)
    logprobs = num_candidates * sum(
        request.sampling.max_tokens * (1 + request.sampling.logprobs)
        for request in requests
        if request.sampling.logprobs is not None
    )
    for found, most, param, what, remedy in (
        (prompt_tokens, _MOST_PROMPT_TOKENS, "prompt", "tokens in the prompts of all generations", "lower n"),
        (prompt_logprobs, MOST_LOGPROBS_HELD, "prompt_logprobs", "log-probabilities of prompts", "lower it"),
        (logprobs, MOST_LOGPROBS_HELD, "logprobs", "log-probabilities", "lower it, n or max_tokens"),
    ):
        if found > most:
            raise RequestError(
                f"{param}: {found} {what}; one request may have at most {most}: {remedy}, or send several requests",
                param,
            )
    return prompt_tokens * _TOKEN_BYTES + (prompt_logprobs + logprobs) * _LOGPROB_BYTES


def check_streamed_prompts(requests: Sequence[Request]) -> None:
    """Raise RequestError if the first chunks of a stream have too many log-probabilities of prompts.

    Chunks are written in the event loop, other responses in a thread.
    """
    found = _num_prompt_logprobs(requests)
    if found > _MOST_STREAMED_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs: {found} log-probabilities of prompts; a stream may have at most "
            f"{_MOST_STREAMED_LOGPROBS}: lower it, or set stream to false",
            "prompt_logprobs",
        )


def _num_prompt_logprobs(requests: Sequence[Request]) -> int:
    return sum(
        len(request.prompt_token_ids) * (1 + request.sampling.prompt_logprobs)
        for request in requests
        if request.sampling.prompt_logprobs is not None
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
