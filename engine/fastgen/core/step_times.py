"""How long a step takes: the work that it does, the coefficients of its time, and the inverse. Pure.

seconds = base + token * tokens + kv_token * kv_tokens + context_pair * context_pairs. See docs/decisions/053.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """What determines how long a step takes.

    Attributes:
        tokens: tokens that the step computes.
        kv_tokens: tokens whose KV it reads, once for each sequence, including those that it computes.
        context_pairs: pairs of a query and a key that an earlier step computed, without those of each sequence's first
            query: reading the KV once, as `kv_tokens` counts, serves that one. So decodes have none.
    """

    tokens: int = 0
    kv_tokens: int = 0
    context_pairs: int = 0

    @classmethod
    def of_chunk(cls, start: int, tokens: int) -> StepWork:
        """Return the work of a chunk of at least one token; the KV of `start` tokens before it is in the cache."""
        return cls(tokens, start + tokens, (tokens - 1) * start)


class StepTime(NamedTuple):
    """A measured step."""

    work: StepWork
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens that the step computed."""
        return self.work.tokens

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.work.tokens / self.seconds


class StepCoefficients(NamedTuple):
    """Seconds for a step, and for each unit of its work, in the order of `StepWork`. Zeros mean unknown, not free.

    Attributes:
        base: reading the weights, and all else that every step does.
        token: computing a token.
        kv_token: reading a token's KV.
        context_pair: attention of a further query to a key.
    """

    base: float = 0.0
    token: float = 0.0
    kv_token: float = 0.0
    context_pair: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the time of a step; 0 if unknown."""
        return (
            self.base
            + self.token * work.tokens
            + self.kv_token * work.kv_tokens
            + self.context_pair * work.context_pairs
        )


class StepTimes(Protocol):
    """Predicts step times."""

    @property
    def coefficients(self) -> StepCoefficients:
        """The present coefficients; zeros if unknown."""


def chunk_seconds(costs: StepCoefficients, start: int, tokens: int) -> float:
    """Return what a chunk of `tokens` tokens adds to a step; 0 for none. See `StepWork.of_chunk`."""
    if tokens == 0:
        return 0.0
    following = costs.token + costs.kv_token + costs.context_pair * start
    return costs.token + costs.kv_token * (start + 1) + following * (tokens - 1)


def chunk_tokens(costs: StepCoefficients, seconds: float, start: int) -> int:
    """Return the longest chunk that adds at most `seconds` to a step; sys.maxsize if nothing bounds it."""
    following = costs.token + costs.kv_token + costs.context_pair * start
    if following <= 0 or math.isinf(seconds):
        return sys.maxsize
    # The tolerance gives back what rounding takes when times of whole tokens are added and subtracted.
    first = costs.token + costs.kv_token * (start + 1)
    return max(0, 1 + math.floor((seconds - first) / following + 1e-6))
