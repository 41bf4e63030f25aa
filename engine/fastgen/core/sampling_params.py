"""How tokens are sampled and when a generation ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from fastgen.core.request_error import RequestError, enumeration, require

# Most alternatives that a client may request per token; OpenAI has the same limit.
MOST_LOGPROBS = 20
# Most tokens that a request may bias.
MOST_LOGIT_BIASES = 1024


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
        logit_bias: (token, value to add to its logit) pairs, or a mapping; values from -100 to 100.
        seed: the same seed gives the same tokens, whatever else is in the batch; None picks a random one.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
        bad_words: sequences of token ids that are not generated in full, unless the grammar leaves no other token.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: report the log-probability of each generated token and of this many most likely alternatives; None
            reports none. Log-probabilities are the model's own, before temperature, penalties and filters.
        prompt_logprobs: the same for each prompt token but the first.
        grammar: the grammar that the generation must match.

    Raises:
        RequestError: if a value is of another type or out of range, `min_tokens` exceeds `max_tokens`, `logit_bias`
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
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        words = _items("bad_words", self.bad_words, "sequences of token ids")
        object.__setattr__(self, "bad_words", tuple(_token_ids("bad_words", word) for word in words))
        require(isinstance(self.grammar, Grammar | None), "grammar", self.grammar, "a Grammar or None")
        for name in INTEGERS:
            value = getattr(self, name)
            fits = _is_integer(value) and abs(int(value)) < 1 << 63
            require(fits or (value is None and name in _OPTIONAL), name, value, "an integer below 2^63")
        for name, (least, most, allowed) in _RANGES.items():
            value = getattr(self, name)
            require(not isinstance(value, bool) and isinstance(value, Real), name, value, "a number")
            require(least <= value <= most, name, value, allowed)
        require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "from 0 to max_tokens")
        if len(self.logit_bias) > MOST_LOGIT_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_LOGIT_BIASES} are accepted", "logit_bias"
            )
        wild = [f"{bias} for token {token}" for token, bias in self.logit_bias if not -100 <= bias <= 100]
        require(not wild, "logit_bias", enumeration(wild), "from -100 to 100")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            require(count is None or 0 <= count <= MOST_LOGPROBS, name, count, f"from 0 to {MOST_LOGPROBS}")
        require(all(self.bad_words), "bad_words", self.bad_words, "without empty words")
        require(self.seed is None or 0 <= self.seed < 1 << 63, "seed", self.seed, "from 0 to 2^63 - 1")


def _items(param: str, value: object, allowed: str) -> tuple[Any, ...]:
    """Return the items of any iterable but text; none for None, the default elsewhere."""
    if value is None:
        return ()
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes), param, repr(value), allowed)
    return tuple(value)  # type: ignore[arg-type]  # it is iterable


def _token_ids(param: str, value: object) -> tuple[int, ...]:
    tokens = _items(param, value, "token ids")
    odd = [repr(token) for token in tokens if not _is_integer(token)]
    require(not odd, param, enumeration(odd), "token ids")
    return tuple(map(int, tokens))


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    allowed = "a mapping or pairs of token ids and numbers"
    pairs = _items("logit_bias", value.items() if isinstance(value, Mapping) else value, allowed)
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and _is_integer(pair[0])
        require(is_pair and isinstance(pair[1], Real), "logit_bias", repr(pair), allowed)
    return tuple((int(token), float(bias)) for token, bias in pairs)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


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
    "repetition_penalty": (1e-6, 100, "from 0.000001 to 100"),  # divided by less, logits overflow
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
}
