"""The state of one request: how many of its tokens are computed.

There are no phases. `tokens` holds the prompt and the generated tokens; the KV of the first `num_computed_tokens` is in
the cache, or will be when the steps in flight have run; the next step computes some of the rest. A sequence whose only
pending token is the one sampled last is decoding. Otherwise it is prefilling, whether it is new or was preempted.

A step that samples appends `UNKNOWN` when it is scheduled, and its result replaces that token. So the next step can be
scheduled while it still runs.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from fastgen.core.constraint import Constraint
from fastgen.core.request import FinishReason, Pooling, Request
from fastgen.core.sampling_params import SamplingParams

# Priority, then ordinal of arrival. Lower is served first.
Rank = tuple[int, int]

# Token id of a token that a step in flight samples.
UNKNOWN = -1


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The state of one request. Invariant until it ends: `0 <= num_computed_tokens < len(tokens)`.

    A sequence that is pooled samples nothing. While its last step is in flight, all its tokens are computed.

    Each field has an owner. Other modules only read it, or call a method of this class.
    """

    request: InitVar[Request]
    _: KW_ONLY
    # Owner: engine/core.py and core/scheduler.py, until they queue the sequence. Constant from then on.
    ordinal: int  # unique position in the order of arrival
    arrival: float  # seconds on the engine's clock
    seed: int  # of its sampling
    id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    pooling: Pooling | None = field(init=False)  # how to pool the prompt; None to generate
    num_prompt_tokens: int = field(init=False)
    # Prompt tokens plus the most tokens that may be generated; the result of pooling counts as one.
    max_length: int = field(init=False)
    rank: Rank = field(init=False)  # scheduling order; lower first
    deadline: float | None = field(init=False)  # seconds on the engine's clock; None for no deadline
    cache_salt: str | None = field(init=False)  # sequences share blocks only if it is equal; None disables sharing
    # Tokens that end the sequence unless `min_tokens` forbids it: the request's and, without `ignore_eos`, the model's.
    stop_tokens: frozenset[int] = field(init=False)
    constraint: Constraint | None = None  # state of its grammar, if any, after all generated tokens

    # Owner: core/scheduler.py, with core/step_planner.py. Progress of the generation.
    tokens: list[int] = field(init=False)  # prompt, then generated ones; the last ones may be `UNKNOWN`
    num_in_flight: int = 0  # scheduled steps that compute this sequence and have no results yet
    # While `num_computed_tokens` is below it, the next step computes the token sampled last into a block that the
    # runner knows, so there is nothing to decide or to send. 0 if unknown.
    decodes_until: int = 0
    lacks_mask: bool = False  # a step in flight samples it without its grammar's mask
    finish_reason: FinishReason | None = None

    # Owner: core/scheduler.py, with core/step_planner.py; core/blocks/kv_cache_manager.py where KV is found or dropped.
    num_computed_tokens: int = 0

    # Owner: core/blocks/kv_cache_manager.py. Where its KV is.
    #
    # KV blocks in order; token i is in slot `i % block_size` of block `block_table[i // block_size]`. Empty while the
    # sequence waits.
    block_table: list[int] = field(default_factory=list)
    # The same for layers with a sliding window that have blocks of their own, see core/blocks/window_pool.py. As long
    # as `block_table`, or empty. The first `num_left_blocks` entries are `LEFT`.
    window_table: list[int] = field(default_factory=list)
    num_left_blocks: int = 0
    host_blocks: list[int] = field(default_factory=list)  # the same for the host buffer, while it is swapped out
    num_published_blocks: int = 0  # leading blocks that are in the prefix cache
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first scheduled
    num_preemptions: int = 0
    #
    # Of a model with recurrent states, see core/blocks/state_pool.py.
    state_slot: int | None = None  # holds its states after the computed tokens; None while it waits
    spare_slot: int | None = None  # holds its states before the token computed last, if it has a grammar
    state_source: int | None = None  # where the next step finds its states if not in `state_slot`
    num_snapshot_tokens: int = 0  # where it took its last snapshot, in tokens; 0 if that is not its own to drop
    # Where the cached blocks ended that it cannot use because no snapshot follows them, in tokens; 0 for none.
    branch: int = 0

    # Owner: model/step_input.py. What the runner has of it.
    row: int | None = None  # its row in the runner's state; None if it has none
    num_sent_blocks: int = 0  # leading entries of its block tables that the runner has

    # Owner: engine/core.py, with engine/step_results.py. What has been reported of it.
    first_scheduled: float | None = None  # when it was first scheduled
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities have been reported
    is_reported: bool = False  # whether any output has been reported
    pooled_sum: Any = None  # sum of the hidden states to pool, of the tokens computed so far: an array of the engine

    def __post_init__(self, request: Request) -> None:
        assert request.prompt_token_ids, "a sequence has at least one token"
        self.id, self.sampling, self.pooling = request.id, request.sampling, request.pooling
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.max_length = self.num_prompt_tokens + (1 if self.pooling is not None else self.sampling.max_tokens)
        self.rank = (request.priority, self.ordinal)
        self.deadline = None if request.deadline_seconds is None else self.arrival + request.deadline_seconds
        self.cache_salt = request.cache_salt
        self.stop_tokens = frozenset(self.sampling.stop_token_ids)

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
        """Whether the token sampled last is the only pending one."""
        return self.num_computed_tokens == len(self.tokens) - 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether the sequence is unfinished and holds no blocks of the cache."""
        return not self.block_table and self.finish_reason is None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether all prompt tokens must be computed, even those in the prefix cache."""
        return self.wants_prompt_logprobs or (self.pooling is not None and self.pooling.method == "mean")

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its prompt is looked up in the prefix cache."""
        return self.cache_salt is not None and not self.needs_all_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether requested prompt log-probabilities are still to be reported."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def advance(self, num_tokens: int) -> None:
        """Record that a step computes `num_tokens` more tokens.

        It also samples one if that leaves none pending, unless the sequence is pooled.
        """
        assert 1 <= num_tokens <= self.num_pending_tokens
        self.num_computed_tokens += num_tokens
        self.num_in_flight += 1
        if self.num_computed_tokens == len(self.tokens) and self.pooling is None:
            self.tokens.append(UNKNOWN)

    def resend_blocks(self, first: int) -> None:
        """Record that block tables have changed from entry `first` on: the runner has only those before it."""
        self.num_sent_blocks = min(self.num_sent_blocks, first)
        self.decodes_until = 0

    def lack_mask(self) -> None:
        """Record that the step in flight samples without the grammar's mask: its token will be discarded."""
        self.lacks_mask, self.decodes_until = True, 0

    @property
    def awaits_mask(self) -> bool:
        """Whether it can only be scheduled when its grammar's next mask is known."""
        return self.lacks_mask or (self.constraint is not None and self.constraint.is_pending)

    def discard_sample(self) -> None:
        """Undo the sampling without a mask: the last token is computed again."""
        assert self.lacks_mask
        assert self.tokens[-1] == UNKNOWN
        self.tokens.pop()
        self.num_computed_tokens -= 1
        self.lacks_mask = False

    def roll_back(self, start: int, *, sampled: bool) -> None:
        """Undo the newest step, which computed the tokens from `start` on and sampled a token or not."""
        self.lacks_mask = False
        if sampled:
            assert self.tokens[-1] == UNKNOWN
            self.tokens.pop()
        self.num_computed_tokens = start

    def settle_pooled(self, computed: int) -> bool:
        """Record that the first `computed` tokens of a pooled sequence are computed.

        Return whether that ends it.
        """
        if computed == len(self.tokens):
            self.finish_reason = FinishReason.STOP
        return self.finish_reason is not None

    def settle(self, index: int, token: int) -> bool:
        """Record that `token` was sampled for `tokens[index]`; return whether the request ends with it."""
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


@dataclass(frozen=True, slots=True)
class RowParameters:
    """What the runner needs to sample a sequence's tokens, sent when the sequence gets a row.

    Attributes:
        row: index of the row in the runner's state.
        seed: of its random numbers, 0 to 2^63 - 1.
        tokens: the sequence so far, prompt first.
    """

    row: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    tokens: list[int]
