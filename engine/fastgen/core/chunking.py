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
# The automatic target: a pass takes this many times what it would take without forward tokens. Four fifths of its
# time then go into tokens: passes without end would be at most a quarter more efficient, at a latency without end.
TIMES_FIXED_COST = 5.0
# It gives way to demand: passes may carry this many times the prompt tokens that the last ones did on average.
TIMES_USUAL = 1.5
PASSES_REMEMBERED = 64
# It gives way to a backlog that would take more passes than this.
PASSES_OF_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a pass could carry.

    Attributes:
        decodes, kv_tokens: sequences that get a decode in it, and the tokens that they have.
        backlog: prompt tokens that could be computed in it or in the next ones, at least 1.
    """

    decodes: int
    kv_tokens: int
    backlog: int


class Target(Protocol):
    """Bounds the passes in which sequences decode."""

    def prompt_tokens(self, load: StepLoad) -> int:
        """The most prompt tokens of the next pass, at least 1."""

    def note(self, prompt_tokens: int) -> None:
        """Takes note of a pass in which sequences decode: it carries this many prompt tokens."""


@dataclass(frozen=True, slots=True)
class NoTarget:
    """Passes are as full as the token budget."""

    def prompt_tokens(self, load: StepLoad) -> int:
        """All of them."""
        return load.backlog

    def note(self, prompt_tokens: int) -> None:
        """Nothing follows from it."""


@dataclass(frozen=True, slots=True)
class FixedTarget:
    """What somebody asked for: passes take at most `seconds`, whatever waits."""

    seconds: float
    times: StepTimes

    def prompt_tokens(self, load: StepLoad) -> int:
        """What is left of the time after the decodes."""
        return max(LEAST_PROMPT_TOKENS, self.times.tokens_within(self.seconds, load.kv_tokens) - load.decodes)

    def note(self, prompt_tokens: int) -> None:
        """Nothing follows from it."""


class AutomaticTarget:
    """Passes as even as demand allows: long enough to be efficient, and longer only where they must be.

    In a steady state each pass has to carry as many prompt tokens as arrive while it runs: they are spread evenly over
    the passes that decodes need anyway if each takes a little more than the average.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._usual = 0.0  # prompt tokens of a pass, on average

    def prompt_tokens(self, load: StepLoad) -> int:
        """The most of what makes an efficient pass, what keeps up with demand, and a share of a long backlog."""
        fixed = self._times.seconds(0, load.kv_tokens)
        efficient = self._times.tokens_within(TIMES_FIXED_COST * fixed, load.kv_tokens) - load.decodes
        demand = int(TIMES_USUAL * self._usual)
        return max(LEAST_PROMPT_TOKENS, efficient, demand, -(-load.backlog // PASSES_OF_BACKLOG))

    def note(self, prompt_tokens: int) -> None:
        """Keeps the average up."""
        self._usual += (prompt_tokens - self._usual) / PASSES_REMEMBERED


@dataclass(frozen=True, slots=True)
class Chunker:
    """Cuts pending prompt tokens into passes: `even` over as few passes as they need, or `greedy`."""

    chunking: Literal["even", "greedy"]
    target: Target

    def prompt_tokens(self, room: int, load: StepLoad) -> int:
        """How many prompt tokens the next pass takes; `room`, at least 1, is what decodes left of the token budget."""
        if load.decodes:
            room = min(room, self.target.prompt_tokens(load))
        return room if self.chunking == "greedy" else even_share(load.backlog, room)

    def note(self, decodes: int, prompt_tokens: int) -> None:
        """Takes note of what the pass became."""
        if decodes:
            self.target.note(prompt_tokens)


def even_share(backlog: int, room: int) -> int:
    """Tokens of each pass when `backlog` tokens are spread evenly over the fewest passes of at most `room`."""
    passes = -(-backlog // room)
    return -(-backlog // passes)
