"""The state of one request, as integer arithmetic over its tokens.

There are no phases. `tokens` holds the prompt and the generated tokens; the KV of the first `num_computed_tokens` is in
the cache, or will be when the steps in flight have run; the next step computes some of the rest. A sequence whose only
pending token is the one sampled last is decoding. With more pending tokens it is prefilling, whether it is new or was
preempted.

A step that samples appends `UNKNOWN` when it is scheduled, and its result replaces that token. So the next step can be
scheduled while it still runs.
"""

from __future__ import annotations

from typing import Any

from fastgen.core.constraint import Constraint
from fastgen.core.request import FinishReason, Pooling, Request, SamplingParams

# Priority, then ordinal of arrival. Lower is served first.
Rank = tuple[int, int]

# Token id of a token that a step in flight samples.
UNKNOWN = -1


class Sequence:
    """The state of one request. Invariant until it ends: `0 <= num_computed_tokens < len(tokens)`.

    A sequence that is pooled samples nothing. While its last step is in flight, all its tokens are computed.

    Attributes:
        tokens: prompt token ids, then generated ones; the last may be `UNKNOWN`.
        max_length: prompt tokens plus the most tokens that may be generated; the result of pooling counts as one.
        pooling: what to return instead of generated tokens; None to generate.
        pooled_sum: sum of the hidden states that are to be pooled, of the tokens computed so far: an array that the
            engine sets.
        block_table: KV blocks in order; token i is in slot `i % block_size` of block `block_table[i // block_size]`.
            Empty while the sequence waits.
        host_blocks: the same for the host buffer, while the sequence is swapped out.
        ordinal: unique position in the order of arrival.
        rank: scheduling order; lower first.
        arrival, deadline: seconds on the engine's clock; None for no deadline.
        cache_salt: sequences share blocks only if their salts are equal; None disables sharing.
        stop_tokens: tokens that end the request unless `min_tokens` forbids it. The scheduler sets them.
        num_published_blocks: leading blocks that are in the prefix cache.
        decodes_until: while `num_computed_tokens` is below it, the next step computes the token sampled last into a
            block that the runner knows. There is nothing to decide, nor to tell the runner. 0 if unknown.
        num_in_flight: scheduled steps that compute this sequence and have no results yet.
        row: index of its row in the runner's state, or None if it has none; see `fastgen.model.step_input`.
        num_sent_blocks: leading entries of `block_table` that the runner has.
        num_cached_tokens: prompt tokens found in the prefix cache when the sequence was first scheduled.
        num_prompt_logprobs: prompt tokens whose log-probabilities have been reported.
        is_reported: whether any output has been reported.
        first_scheduled: when the sequence was first scheduled, or None.
        seed: seed of its sampling.
        constraint: state of its grammar, if any, after all generated tokens.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "cache_salt",
        "constraint",
        "deadline",
        "decodes_until",
        "finish_reason",
        "first_scheduled",
        "host_blocks",
        "id",
        "is_reported",
        "max_length",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_sent_blocks",
        "ordinal",
        "pooled_sum",
        "pooling",
        "rank",
        "row",
        "sampling",
        "seed",
        "stop_tokens",
        "tokens",
    )

    def __init__(self, request: Request, *, ordinal: int, arrival: float, seed: int) -> None:
        assert request.prompt_token_ids, "a sequence has at least one token"
        self.id: str = request.id
        self.sampling: SamplingParams = request.sampling
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.pooling: Pooling | None = request.pooling
        self.pooled_sum: Any = None
        self.max_length = self.num_prompt_tokens + (1 if self.pooling is not None else self.sampling.max_tokens)
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []
        self.ordinal = ordinal
        self.rank: Rank = (request.priority, ordinal)
        self.arrival = arrival
        self.deadline = None if request.deadline_seconds is None else arrival + request.deadline_seconds
        self.cache_salt: str | None = request.cache_salt
        self.stop_tokens: frozenset[int] = frozenset(self.sampling.stop_token_ids)
        self.num_published_blocks = 0
        self.decodes_until = 0
        self.row: int | None = None
        self.num_sent_blocks = 0
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        self.is_reported = False
        self.seed = seed
        self.constraint: Constraint | None = None
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, {self.num_computed_tokens}/{len(self.tokens)} tokens)"

    @property
    def priority(self) -> int:
        """Priority of the request; lower is served first."""
        return self.rank[0]

    @property
    def num_pending_tokens(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far, or being sampled."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Return whether the token sampled last is the only pending one."""
        return self.num_computed_tokens == len(self.tokens) - 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_waiting(self) -> bool:
        """Return whether the sequence is unfinished and holds no blocks of the cache."""
        return not self.block_table and self.finish_reason is None

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether the request needs all prompt tokens computed, even those in the prefix cache."""
        return self.wants_prompt_logprobs or (self.pooling is not None and self.pooling.method == "mean")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether requested prompt log-probabilities are still to be reported."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def advance(self, num_tokens: int) -> None:
        """Record that a step computes `num_tokens` more tokens.

        The step also samples a token if no pending token is left after them.
        """
        assert 1 <= num_tokens <= self.num_pending_tokens
        self.num_computed_tokens += num_tokens
        self.num_in_flight += 1
        if self.num_computed_tokens == len(self.tokens) and self.pooling is None:
            self.tokens.append(UNKNOWN)

    def roll_back(self, start: int, *, sampled: bool) -> None:
        """Undo the newest step, which computed the tokens from `start` on and sampled a token or not."""
        if sampled:
            assert self.tokens[-1] == UNKNOWN
            self.tokens.pop()
        self.num_computed_tokens = start

    def settle_pooled(self, computed: int) -> bool:
        """Record that the first `computed` tokens of a pooled sequence are computed.

        Return whether that ends the sequence.
        """
        if computed == len(self.tokens):
            self.finish_reason = FinishReason.STOP
        return self.finish_reason is not None

    def settle(self, index: int, token: int) -> bool:
        """Record that `token` was sampled for `tokens[index]`.

        Returns:
            Whether the request ends with it; `finish_reason` is set then.
        """
        assert self.tokens[index] == UNKNOWN, f"{self}: token {index} was sampled twice"
        self.tokens[index] = token
        # Most tokens pass this check. Each step settles hundreds.
        if token not in self.stop_tokens and index + 1 < self.max_length and self.constraint is None:
            return False
        assert self.finish_reason is None
        if self.constraint is not None:
            self.constraint.accept(token)
            self.finish_reason = self.constraint.end
        if self.finish_reason is None:
            if token in self.stop_tokens and index + 1 - self.num_prompt_tokens >= self.sampling.min_tokens:
                self.finish_reason = FinishReason.STOP
            elif index + 1 >= self.max_length:
                self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None
