"""The results of a step: sampled tokens and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Why a step was not replayed from a CUDA graph: there are no graphs, it has more tokens than the largest graph, or more
# prompt logprobs or pooled tokens than the graph of its number of tokens has room for.
EagerReason = Literal["off", "tokens", "prompt_logprobs", "pooling"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token at its position, by the model alone (natural logarithm).

    Attributes:
        rank: 1 for the most likely token of the vocabulary, 2 for the next.
        top: the most likely tokens with their log-probabilities, in descending order, as many as requested.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step.

    Attributes:
        token_ids: one for each chunk that samples, in the order of the chunks.
        logprobs: of some of them, where requested, by index in `token_ids`.
        prompt_logprobs: by chunk index, for chunks of requests with `prompt_logprobs`: one entry for each token of the
            chunk that is followed by a prompt token, about that next token. For the last chunk of a request that is
            pooled by "logprobs": one entry for each of `Pooling.token_ids`.
        pooled: by chunk index, a float32 array [hidden]. For chunks of requests that are pooled by "mean": the sum of
            the hidden states of their tokens. For the last chunk of a request that is pooled by "last": the hidden
            state of its last token.
        eager_reason: why the step was not replayed from a CUDA graph; None if it was replayed.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, Any] = field(default_factory=dict)
    eager_reason: EagerReason | None = "off"
