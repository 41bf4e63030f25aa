"""Requests, and why they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from fastgen.core.request_error import RequestError, enumeration, require
from fastgen.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended.

    Clients see `abort` for `deadline` too, because OpenAI's API has no such reason.
    """

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string, or the prompt is pooled
    LENGTH = "length"  # max_tokens, or the maximum model length
    ABORT = "abort"  # cancelled by the client, or still running at the end of a drain
    DEADLINE = "deadline"  # its own deadline passed; clients get an error if it has no tokens yet
    OUT_OF_MEMORY = "out_of_memory"  # the device lacked the memory to compute it, even alone; clients get an error
    GRAMMAR = "grammar"  # its grammar is invalid, or could not be followed to its end; clients get an error
    REJECTED = "rejected"  # the engine rejected what the server had accepted: a defect; clients get an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a prompt's last hidden states are pooled, instead of generating tokens.

    Attributes:
        method: "last" gives the hidden state of the last token, "mean" the mean of all of them, and "logprobs" the
            log-probabilities of `token_ids` as the next token.
        token_ids: for "logprobs" only.
    """

    method: Literal["last", "mean", "logprobs"]
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.token_ids) == (self.method == "logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue, or to pool.

    Attributes:
        id: unique among unfinished requests.
        pooling: how to pool the prompt instead of generating; None to generate. Leave `sampling` at its default
            then: nothing is sampled.
        priority: lower is served first. Within a priority, the oldest prompt gets half of a step's prompt tokens, and
            the shortest ones get the rest.
        deadline_seconds: seconds after arrival at which the request ends, finished or not; None for no deadline.
        cache_salt: requests share cached prefixes only if their salts are equal, so that a tenant cannot probe the
            prompts of others by timing.

    Raises:
        RequestError: if a value is out of range.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_seconds: float | None = None
    cache_salt: str = ""
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        require(-(1 << 31) <= self.priority < 1 << 31, "priority", self.priority, "from -2^31 to 2^31 - 1")
        require(
            self.deadline_seconds is None or 0 < self.deadline_seconds <= 1e6,
            "deadline_seconds",
            self.deadline_seconds,
            "above 0 and at most 1e6",
        )

    def check(self, max_model_length: int, vocabulary_size: int) -> None:
        """Raise RequestError if the model cannot serve this request."""
        if not self.prompt_token_ids:
            raise RequestError("prompt: empty; give at least one token", "prompt")
        self._check_length(max_model_length)
        # Lengths are checked before contents: a prompt of millions of tokens takes long to look at.
        if not 0 <= min(self.prompt_token_ids) <= max(self.prompt_token_ids) < vocabulary_size:
            token = next(token for token in self.prompt_token_ids if not 0 <= token < vocabulary_size)
            raise RequestError(
                f"prompt: token {token} is not in the vocabulary; token ids go from 0 to {vocabulary_size - 1}",
                "prompt",
            )
        self._check_named_tokens(vocabulary_size)

    def _check_length(self, max_model_length: int) -> None:
        prompt, generation = len(self.prompt_token_ids), self.sampling.max_tokens
        if self.pooling is not None:
            if prompt > max_model_length:
                raise RequestError(f"prompt: {prompt} tokens; the limit is {max_model_length}; shorten it", "prompt")
        elif prompt >= max_model_length:
            raise RequestError(
                f"prompt: {prompt} tokens; the limit is {max_model_length}, generated tokens included; shorten it",
                "prompt",
            )
        elif prompt + generation > max_model_length:
            raise RequestError(
                f"the prompt has {prompt} tokens and max_tokens is {generation}: their sum, {prompt + generation}, "
                f"exceeds the limit of {max_model_length} tokens; lower max_tokens to {max_model_length - prompt}",
                "max_tokens",
            )

    def _check_named_tokens(self, vocabulary_size: int) -> None:
        sampling = self.sampling
        named = {
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "stop_token_ids": sampling.stop_token_ids,
            "bad_words": [token for word in sampling.bad_words for token in word],
            "allowed_token_ids": () if sampling.grammar is None else sampling.grammar.token_ids,
        }
        for param, tokens in named.items():
            strangers = [token for token in tokens if not 0 <= token < vocabulary_size]
            if strangers:
                raise RequestError(
                    f"{param} names tokens outside the vocabulary, {enumeration(strangers)}: token ids go from 0 to "
                    f"{vocabulary_size - 1}",
                    param,
                )
