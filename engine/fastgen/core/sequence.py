"""One request under way, as integer arithmetic over its tokens.

There are no phases. `tokens` is the prompt and what was generated so far; `num_computed_tokens` of them have their keys
and values in the cache; a pass computes some of the rest. A sequence whose one pending token is the one generated last
is what others call decoding; with more pending it is what they call prefilling, whether it is new or was preempted.
"""

from __future__ import annotations

from fastgen.core.constraint import Constraint
from fastgen.core.request import FinishReason, Request, SamplingParams

# Priority, then place in the order of arrival: of two sequences the lower one is better and is served first.
Rank = tuple[int, int]


class Sequence:
    """The state of one request: `0 <= num_computed_tokens < len(tokens)` as long as it is alive.

    Attributes:
        tokens: prompt token ids, then generated ones.
        block_table: KV blocks in order; token i lies in block `block_table[i // block_size]`, slot `i % block_size`.
            Empty while the sequence waits.
        host_blocks: the same in the host buffer, while it is swapped out; then the cache holds none of it.
        ordinal: place in the order of arrival, unique.
        rank: where it stands among all.
        arrival, deadline: seconds on the engine's clock; None for no deadline.
        cache_salt: only sequences of the same salt share blocks; None for one that shares with nobody.
        num_published_blocks: leading blocks that the prefix cache knows.
        num_cached_tokens: prompt tokens that were found in the prefix cache when it was first scheduled.
        num_prompt_logprobs: prompt tokens whose log-probabilities were reported.
        is_reported: was anything reported of it?
        first_scheduled: when its first token was first put into a pass, or None.
        seed: what sampling is seeded with.
        constraint: what may be generated next, where the request has a grammar; it has seen every generated token.
        history: what the sampler keeps of this sequence from pass to pass, which nobody else looks at.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "cache_salt",
        "constraint",
        "deadline",
        "finish_reason",
        "first_scheduled",
        "history",
        "host_blocks",
        "id",
        "is_reported",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "ordinal",
        "rank",
        "sampling",
        "seed",
        "tokens",
    )

    def __init__(self, request: Request, *, ordinal: int, arrival: float, seed: int) -> None:
        assert request.prompt_token_ids, "a sequence has at least one token"
        self.id: str = request.id
        self.sampling: SamplingParams = request.sampling
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []
        self.ordinal = ordinal
        self.rank: Rank = (request.priority, ordinal)
        self.arrival = arrival
        self.deadline = None if request.deadline_seconds is None else arrival + request.deadline_seconds
        self.cache_salt: str | None = request.cache_salt
        self.num_published_blocks = 0
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0
        self.is_reported = False
        self.seed = seed
        self.constraint: Constraint | None = None
        self.history: object | None = None
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, {self.num_computed_tokens}/{len(self.tokens)} tokens)"

    @property
    def num_pending_tokens(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Is the token sampled last the only one pending?"""
        return self.num_computed_tokens == len(self.tokens) - 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_waiting(self) -> bool:
        """Is it alive without blocks of the cache?"""
        return not self.block_table and self.finish_reason is None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Are there prompt tokens whose log-probabilities were asked for and not reported yet?"""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def advance(self, num_tokens: int) -> None:
        """Notes that `num_tokens` more tokens have their KV in the cache."""
        assert 1 <= num_tokens <= self.num_pending_tokens
        self.num_computed_tokens += num_tokens

    def append(self, token: int, end_tokens: frozenset[int]) -> None:
        """Adds the sampled `token`; sets `finish_reason` if the request ends with it."""
        assert self.num_pending_tokens == 0, f"{self} sampled before its last chunk"
        assert self.finish_reason is None
        self.tokens.append(token)
        generated, sampling = self.num_generated_tokens, self.sampling
        ends = token in sampling.stop_token_ids or (token in end_tokens and not sampling.ignore_eos)
        if self.constraint is not None:
            self.constraint.accept(token)
            self.finish_reason = self.constraint.end
        if self.finish_reason is not None:
            return
        if ends and generated >= sampling.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif generated >= sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def forget(self) -> None:
        """Drops what was computed (its blocks are the pool's again): all tokens are pending once more."""
        assert not self.block_table
        self.num_computed_tokens = 0
