"""What a client asks of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RequestError(ValueError):
    """A request that cannot be served; `param` names the field at fault, the message says the remedy."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's longest length
    ABORT = "abort"  # cancelled by its client, or cut by a drain


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: tokens before which neither end-of-sequence nor a stop token ends the request.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities reach this sum.
        min_p: drop tokens less likely than this share of the likeliest one.
        seed: the same seed gives the same tokens, whatever else is in the batch; None draws one.
        stop_token_ids: tokens that end the request beside the model's own end-of-sequence tokens.
        ignore_eos: go on over the model's own end-of-sequence tokens.

    Raises:
        RequestError: when built with a value out of range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "from 0 to max_tokens")
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "from 0 (greedy) to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(self.seed is None or 0 <= self.seed < 1 << 63, "seed", self.seed, "from 0 to 2^63 - 1")


def _require(holds: bool, param: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{param} is {value}: it must be {allowed}", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `id` is unique among the requests alive."""

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def check(self, max_model_length: int, vocabulary_size: int) -> None:
        """Raises RequestError when the model cannot serve this request."""
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        for token in self.prompt_token_ids:
            if not 0 <= token < vocabulary_size:
                raise RequestError(
                    f"prompt token {token} is not in the vocabulary: token ids go from 0 to {vocabulary_size - 1}",
                    "prompt",
                )
        prompt, generation = len(self.prompt_token_ids), self.sampling.max_tokens
        if prompt >= max_model_length:
            raise RequestError(
                f"the prompt has {prompt} tokens and the longest prompt plus generation served here is "
                f"{max_model_length} tokens: shorten the prompt",
                "prompt",
            )
        if prompt + generation > max_model_length:
            raise RequestError(
                f"max_tokens is {generation} and the prompt has {prompt} tokens, {prompt + generation} together: "
                f"at most {max_model_length} are served here, so lower max_tokens to {max_model_length - prompt}",
                "max_tokens",
            )
