"""Requests and their sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Literal

# Most alternatives that a client may request per token; OpenAI has the same limit.
MOST_LOGPROBS = 20
# Most tokens that a request may bias.
MOST_LOGIT_BIASES = 1024
_MOST_NAMED = 16  # invalid tokens that an error message lists


class RequestError(ValueError):
    """A request that cannot be served. `param` names the invalid field; the message says how to fix it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    """Why a request ended.

    Clients see `abort` for `deadline` too, because OpenAI's API has no such reason.
    """

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the maximum model length
    ABORT = "abort"  # cancelled by the client, or still running at the end of a drain
    DEADLINE = "deadline"  # its own deadline passed; clients get an error if it has no tokens yet
    OUT_OF_MEMORY = "out_of_memory"  # the device lacked the memory to compute it, even alone; clients get an error
    GRAMMAR = "grammar"  # its grammar is invalid, or could not be followed to its end; clients get an error
    REJECTED = "rejected"  # the engine rejected what the server had accepted: a defect; clients get an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that the whole generation must match.

    Attributes:
        kind: how to read `text`: as a JSON schema, a regular expression, a grammar in Lark syntax, or token ids
            separated by commas, which are the only tokens allowed. "json_object" needs no text and allows any JSON
            object.

    Raises:
        RequestError: if token ids are not integers.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark", "tokens"]
    text: str = ""

    def __post_init__(self) -> None:
        try:
            _ = self.token_ids
        except ValueError:
            raise RequestError("grammar: its tokens are not ids with commas between them", "grammar") from None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of a grammar that is a set of tokens; empty for other grammars."""
        return tuple(map(int, self.text.split(","))) if self.kind == "tokens" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and when generation ends.

    Attributes:
        max_tokens: maximum number of generated tokens.
        min_tokens: neither an end-of-sequence nor a stop token ends the request before this many tokens. A completed
            grammar does.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens whose cumulative probability reaches this value.
        min_p: drop tokens less likely than this fraction of the most likely token.
        typical_p: keep the tokens whose surprisal is closest to the expected one until their cumulative probability
            reaches this value (Meister et al., 2022); 1 keeps all.
        repetition_penalty: divides positive logits of tokens in prompt and generation by this factor and multiplies
            negative ones (Keskar et al., 2019); 1 is off.
        presence_penalty: subtracted from the logit of every token that was generated.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        logit_bias: (token, value to add to its logit) pairs; values from -100 to 100.
        seed: the same seed gives the same tokens, whatever else is in the batch; None picks a random one.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
        bad_words: token sequences that are not generated in full, unless the grammar leaves no other token.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: report the log-probability of each generated token and of this many most likely alternatives; None
            reports none. Log-probabilities are the model's own, before temperature, penalties and filters.
        prompt_logprobs: the same for each prompt token but the first.
        grammar: the grammar that the generation must match.

    Raises:
        RequestError: if a number is of another type or out of range, `min_tokens` exceeds `max_tokens`, `logit_bias`
            has too many tokens, or a bad word is empty.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in INTEGERS:
            value = getattr(self, name)
            is_integer = not isinstance(value, bool) and isinstance(value, Integral) and abs(int(value)) < 1 << 63
            _require(is_integer or (value is None and name in _OPTIONAL), name, value, "an integer below 2^63")
        for name, (least, most, allowed) in _RANGES.items():
            value = getattr(self, name)
            _require(not isinstance(value, bool) and isinstance(value, Real), name, value, "a number")
            _require(least <= value <= most, name, value, allowed)
        _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "from 0 to max_tokens")
        if len(self.logit_bias) > MOST_LOGIT_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_LOGIT_BIASES} are accepted", "logit_bias"
            )
        wild = [f"{bias} for token {token}" for token, bias in self.logit_bias if not -100 <= bias <= 100]
        _require(not wild, "logit_bias", _enumeration(wild), "from -100 to 100")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(count is None or 0 <= count <= MOST_LOGPROBS, name, count, f"from 0 to {MOST_LOGPROBS}")
        _require(all(self.bad_words), "bad_words", self.bad_words, "without empty words")
        _require(self.seed is None or 0 <= self.seed < 1 << 63, "seed", self.seed, "from 0 to 2^63 - 1")


_OPTIONAL = ("logprobs", "prompt_logprobs", "seed")
# Sampling parameters that are integers, of 64 bits in messages and in the samplers.
INTEGERS = ("max_tokens", "min_tokens", "top_k", *_OPTIONAL)
_ABOVE_0 = math.ulp(0.0)
# Least and most of each sampling parameter that is a number, and the same in words.
_RANGES = {
    "max_tokens": (1, math.inf, "at least 1"),
    "min_tokens": (0, math.inf, "from 0 to max_tokens"),
    "temperature": (0, 100, "from 0 (greedy) to 100"),
    "top_k": (0, math.inf, "0 (off) or more"),
    "top_p": (_ABOVE_0, 1, "above 0 and at most 1"),
    "min_p": (0, 1, "from 0 to 1"),
    "typical_p": (_ABOVE_0, 1, "above 0 and at most 1"),
    "repetition_penalty": (_ABOVE_0, 100, "above 0 and at most 100"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
}


def _enumeration(items: Sequence[object]) -> str:
    """Return the items as text, cut after the first few."""
    named = ", ".join(map(str, items[:_MOST_NAMED]))
    return named if len(items) <= _MOST_NAMED else f"{named} and {len(items) - _MOST_NAMED} more"


def _require(holds: bool, param: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{param} is {value}: it must be {allowed}", param)


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
        _require(-(1 << 31) <= self.priority < 1 << 31, "priority", self.priority, "from -2^31 to 2^31 - 1")
        _require(
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
                    f"{param} names tokens outside the vocabulary, {_enumeration(strangers)}: token ids go from 0 to "
                    f"{vocabulary_size - 1}",
                    param,
                )
