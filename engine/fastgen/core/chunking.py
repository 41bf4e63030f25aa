"""Decides how many prompt tokens a step computes besides its decodes. See docs/decisions/005.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.1: throughput is concave in the tokens of a step, so P pending prompt
tokens over F steps are best computed P/F at a time. Every token of a step also delays the next token of every decoding
sequence, so steps with decodes are bounded by time as well. A token takes longer, the longer its context is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fastgen.core.step_times import StepCoefficients, StepTimes, StepWork, chunk_seconds, chunk_tokens

# A step may take this many prompt tokens, whatever its target. They add little to the fixed cost of a step, and without
# them a target that cannot be met would starve prompts. Over a long context they may cost more: see
# `Allowance.least_tokens`.
MIN_PROMPT_TOKENS = 16
# Matrix products compute rows in tiles, and some pad them: filling up a tile costs nothing.
ROW_MULTIPLE = 16
# The automatic target, for prompts without a context, is this multiple of the time of a step without tokens. Four
# fifths of it are then spent on tokens: infinitely long steps would be at most a quarter more efficient.
FIXED_COST_MULTIPLE = 5.0
# As many tokens take longer over a context, up to this multiple. So a long prompt takes little longer than in full
# steps, and the gaps of decoding sequences are at most about this multiple of those without it.
LONGEST_MULTIPLE = 12.0
# The target is exceeded to keep up with demand: up to this multiple of the recent average of prompt tokens per step,
# averaged over about AVERAGED_STEPS steps.
DEMAND_MULTIPLE = 1.5
AVERAGED_STEPS = 64
# It is also exceeded if the backlog would otherwise take more steps than this.
MAX_BACKLOG_STEPS = 64
# `StepLimit` doubles after this many steps that had enough memory. A lasting shortage fails one step in that many.
STEPS_PER_GROWTH = 32


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work available for a step.

    Attributes:
        decodes: sequences that decode in it.
        kv_tokens: tokens of these sequences whose KV is in the cache.
        backlog: prompt tokens that could be computed in this step or the next ones, at least 1.
        awaiting: sequences that decode in a later step, because they await the mask of their grammar.
    """

    decodes: int
    kv_tokens: int
    backlog: int
    awaiting: int = 0

    @property
    def decode_work(self) -> StepWork:
        """The work of the step without prompts."""
        return StepWork(self.decodes, self.kv_tokens + self.decodes)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What prompts may still take of a step.

    Attributes:
        tokens: the most tokens.
        seconds: the longest time of these tokens by `costs`, over whatever context. Less than 0 if it was exceeded.
        costs: the coefficients of the step's time.
        decode_seconds: time of the step without prompts.
        excess: tokens by which the last chunk may exceed the time in order to fill a tile of rows.
    """

    tokens: int
    seconds: float = math.inf
    costs: StepCoefficients = field(default=StepCoefficients())
    decode_seconds: float = 0.0
    excess: int = 0

    @property
    def half(self) -> Allowance:
        """Half of it, rounded up to a whole token."""
        return replace(self, tokens=-(-self.tokens // 2), seconds=self.seconds / 2)

    def tokens_in_time(self, start: int, before: int) -> int:
        """Return by how many tokens a chunk of `before` tokens at context `start` may grow in the time."""
        return chunk_tokens(self.costs, self.seconds + chunk_seconds(self.costs, start, before), start) - before

    def least_tokens(self, start: int) -> int:
        """Return how many tokens the first chunk of a step may have at context `start`, whatever the time.

        They are `MIN_PROMPT_TOKENS`, or fewer if they would more than double the time of a step with one of them. So
        prompts get at least half of the time, or that many tokens, and decodes wait at most twice as long.
        """
        first = chunk_seconds(self.costs, start, 1)
        return min(MIN_PROMPT_TOKENS, chunk_tokens(self.costs, self.decode_seconds + 2 * first, start))

    def is_mostly_attention(self, start: int) -> bool:
        """Return whether a token at context `start` takes longer to attend to the context than for all else."""
        return self.costs.context_pair * start > self.costs.token

    def without(self, start: int, before: int, added: int) -> Allowance:
        """Return what is left when a chunk of `before` tokens at context `start` grows by `added`."""
        spent = chunk_seconds(self.costs, start, before + added) - chunk_seconds(self.costs, start, before)
        return replace(self, tokens=self.tokens - added, seconds=self.seconds - spent)


class Target:
    """Bounds the prompts of steps in which sequences decode. This base class sets no bound."""

    def allowance(self, load: StepLoad) -> Allowance:
        """Return what the prompts of the next step may take.

        `Allowance.tokens` is that of a chunk at the start of a prompt. Chunks over a context take longer, and
        `Allowance.seconds` bounds them, too.
        """
        return Allowance(load.backlog)

    def observe(self, prompt_tokens: int) -> None:
        """Record the prompt tokens of a step in which sequences decode."""


@dataclass(frozen=True, slots=True)
class FixedTarget(Target):
    """A configured target: steps take at most `seconds`, whatever the backlog.

    The least tokens of a step are allowed even if the target cannot be met.
    """

    seconds: float
    times: StepTimes

    def allowance(self, load: StepLoad) -> Allowance:
        """Return the time that the decodes leave, and the tokens that fit; at least `MIN_PROMPT_TOKENS`."""
        costs = self.times.coefficients
        decode_seconds = costs.seconds(load.decode_work)
        left = self.seconds - decode_seconds
        tokens = max(MIN_PROMPT_TOKENS, chunk_tokens(costs, left, 0))
        return Allowance(tokens, max(left, chunk_seconds(costs, 0, MIN_PROMPT_TOKENS)), costs, decode_seconds)


class AutomaticTarget(Target):
    """Steps as even as demand allows: long enough to be efficient, longer only to keep up.

    In a steady state each step must compute as many prompt tokens as arrive while it runs. If each step takes a little
    more than the average, they are spread evenly over the steps that the decodes need anyway.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._average = 0.0  # prompt tokens per step

    def allowance(self, load: StepLoad) -> Allowance:
        """Return the tokens of an efficient step, more to keep up with demand or the backlog, and their longest time.

        They are at least `MIN_PROMPT_TOKENS`.
        """
        costs = self._times.coefficients
        fixed, decode_seconds = costs.seconds(StepWork(0, load.kv_tokens)), costs.seconds(load.decode_work)
        efficient = FIXED_COST_MULTIPLE * fixed - decode_seconds
        demand = int(DEMAND_MULTIPLE * self._average)
        backlog = -(-load.backlog // MAX_BACKLOG_STEPS)
        tokens = max(MIN_PROMPT_TOKENS, chunk_tokens(costs, efficient, 0), demand, backlog)
        longest = LONGEST_MULTIPLE * fixed - decode_seconds
        seconds = max(longest, chunk_seconds(costs, 0, tokens))
        return Allowance(tokens, seconds, costs, decode_seconds, excess=ROW_MULTIPLE // 2 - 1)  # to the nearest tile

    def observe(self, prompt_tokens: int) -> None:
        """Update the moving average."""
        self._average += (prompt_tokens - self._average) / AVERAGED_STEPS


@dataclass(frozen=True, slots=True)
class Chunker:
    """Splits pending prompt tokens into steps.

    Attributes:
        chunking: "even" spreads them evenly over as few steps as they need, "greedy" fills each step.
        target: bounds steps with decodes.
    """

    chunking: str
    target: Target

    def allowance(self, room: int, load: StepLoad) -> Allowance:
        """Return what the prompts of the next step may take.

        Args:
            room: token budget left by the decodes, at least 1.
            load: the work available for the step.
        """
        allowed = self.target.allowance(load) if load.decodes or load.awaiting else Allowance(room)
        if allowed.tokens < min(room, load.backlog):
            room = min(room, whole_tiles(load.decodes, allowed.tokens, allowed.excess))
        if self.chunking == "greedy":
            return replace(allowed, tokens=room)
        share = even_share(load.backlog, room)
        if load.decodes and share < load.backlog:
            share = min(room, share + -(load.decodes + share) % ROW_MULTIPLE)
        return replace(allowed, tokens=share)

    def observe(self, decodes: int, prompt_tokens: int) -> None:
        """Record the contents of a step."""
        if decodes:
            self.target.observe(prompt_tokens)


def target_of(setting: int | str, times: StepTimes) -> Target:
    """Return the target for the setting `inter_token_target`: milliseconds, `auto` or `off`."""
    if isinstance(setting, int):
        return FixedTarget(setting / 1000, times)
    return AutomaticTarget(times) if setting == "auto" else Target()


def whole_tiles(decodes: int, prompt_tokens: int, excess: int) -> int:
    """Return the most prompt tokens with which a step fills whole tiles of rows.

    They are at most `prompt_tokens + excess`. If they are fewer than `MIN_PROMPT_TOKENS`, return `prompt_tokens`.
    """
    whole = (decodes + prompt_tokens + excess) // ROW_MULTIPLE * ROW_MULTIPLE - decodes
    return whole if whole >= MIN_PROMPT_TOKENS else prompt_tokens


def even_share(backlog: int, room: int) -> int:
    """Return the step size that spreads `backlog` evenly over the fewest steps of at most `room` tokens."""
    steps = -(-backlog // room)
    return -(-backlog // steps)


class StepLimit:
    """Limit of a step's tokens, lowered when steps run out of memory.

    When a step runs out of memory, the limit becomes half of that step's tokens, at least one. It doubles after
    `STEPS_PER_GROWTH` steps with enough memory, up to the token budget. A step of n tokens is retried at most log2(n)
    times: the last retry has one token, of one sequence.

    Attributes:
        tokens: most tokens of a step now, and most sequences in it.
    """

    def __init__(self, token_budget: int) -> None:
        self.tokens = token_budget
        self._token_budget = token_budget
        self._num_steps = 0

    def shrink(self, num_tokens: int) -> None:
        """Record that a step of `num_tokens` tokens ran out of memory."""
        self.tokens = max(1, num_tokens // 2)
        self._num_steps = 0

    def record(self) -> None:
        """Record that a step had enough memory."""
        if self.tokens == self._token_budget:
            return
        self._num_steps += 1
        if self._num_steps == STEPS_PER_GROWTH:
            self.tokens = min(self._token_budget, 2 * self.tokens)
            self._num_steps = 0
