"""What a pass gives back: tokens, and how likely they were."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was at its place, by the model itself (natural logarithm).

    Attributes:
        rank: 1 for the likeliest token of the vocabulary, 2 for the next.
        top: the likeliest tokens with their log-probabilities, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that was chosen after a chunk; `logprobs` where its request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What came of a pass.

    Attributes:
        sampled: one for each chunk that samples, in the order of the chunks.
        prompt_logprobs: by index of the chunk, for chunks of requests that ask for them: of each of the chunk's tokens
            that has a prompt token after it, the log-probabilities of that next prompt token.
    """

    sampled: list[SampledToken]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
