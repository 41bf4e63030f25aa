"""How many prompt tokens go into a pass beside its decodes. See docs/decisions/005.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.1: throughput is concave in the tokens of a pass, so P pending prompt
tokens over F passes are best computed P/F at a time. And every token of a pass delays the next token of every sequence
that decodes, so while there are such, a pass is bounded by time as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fastgen.core.step_model import StepTimes

# A pass has room for this many prompt tokens whatever its target: beside what any pass costs they cost little, and
# without them a target that cannot be met would starve prompts.
LEAST_PROMPT_TOKENS = 16
# The automatic target: a pass takes this many times what it would take without forward tokens. Two thirds of its time
# then go into tokens: passes without end would be at most half again as efficient, at a latency without end.
TIMES_FIXED_COST = 3.0
# The automatic target gives way to a backlog that would take more passes than this.
PASSES_OF_BACKLOG = 16


class Target(Protocol):
    """Bounds passes in which sequences decode."""

    def prompt_tokens(self, decodes: int, kv_tokens: int, backlog: int) -> int:
        """The most prompt tokens beside `decodes` decodes of `kv_tokens` tokens, while `backlog` are pending."""


@dataclass(frozen=True, slots=True)
class NoTarget:
    """Passes are as full as the token budget."""

    def prompt_tokens(self, decodes: int, kv_tokens: int, backlog: int) -> int:
        """All of them."""
        return backlog


@dataclass(frozen=True, slots=True)
class FixedTarget:
    """What somebody asked for: passes take at most `seconds`, whatever waits."""

    seconds: float
    times: StepTimes

    def prompt_tokens(self, decodes: int, kv_tokens: int, backlog: int) -> int:
        """What is left of the time after the decodes."""
        return max(LEAST_PROMPT_TOKENS, self.times.tokens_within(self.seconds, kv_tokens) - decodes)


@dataclass(frozen=True, slots=True)
class AutomaticTarget:
    """Passes long enough to be efficient and no longer, unless the backlog grows."""

    times: StepTimes

    def prompt_tokens(self, decodes: int, kv_tokens: int, backlog: int) -> int:
        """What makes the pass `TIMES_FIXED_COST` times as long as its fixed cost, or a share of a long backlog."""
        fixed = self.times.seconds(0, kv_tokens)
        efficient = self.times.tokens_within(TIMES_FIXED_COST * fixed, kv_tokens) - decodes
        return max(LEAST_PROMPT_TOKENS, efficient, -(-backlog // PASSES_OF_BACKLOG))


@dataclass(frozen=True, slots=True)
class Shaper:
    """Cuts pending prompt tokens into passes: `even` over as few passes as they need, or `greedy`."""

    chunking: Literal["even", "greedy"]
    target: Target

    def prompt_tokens(self, room: int, decodes: int, kv_tokens: int, backlog: int) -> int:
        """How many prompt tokens the next pass takes.

        Args:
            room: what the decodes left of the token budget, at least 1.
            decodes, kv_tokens: sequences that get a decode in this pass, and the tokens that they have.
            backlog: prompt tokens that could be computed now, in this pass and the next ones, at least 1.
        """
        if decodes:
            room = min(room, self.target.prompt_tokens(decodes, kv_tokens, backlog))
        if self.chunking == "greedy":
            return room
        return even_share(backlog, room)


def even_share(backlog: int, room: int) -> int:
    """Tokens of each pass when `backlog` tokens are spread evenly over the fewest passes of at most `room`."""
    passes = -(-backlog // room)
    return -(-backlog // passes)
