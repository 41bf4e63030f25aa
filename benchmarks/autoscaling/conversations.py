"""Traces whose prompts share prefixes, generated from a seed: many users of system prompts, and sessions of agents.

Each prompt has the numbers of its blocks, see `benchmarks.autoscaling.replica.Arrival`. The times are fixed in advance:
a late answer does not delay the next turn, so that all routings get the same requests.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.autoscaling.replica import Arrival
from benchmarks.autoscaling.steps import BLOCK_TOKENS
from benchmarks.autoscaling.traces import AZURE_CONVERSATION, WARM_UP, Lengths, Mix, Rate, Trace, hump

# Longest prompt and answer together, in tokens: that of a model of 128 Ki positions is never reached.
_MOST_TOKENS: Final = 64_000


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Users of a few long system prompts.

    Attributes:
        prompts: number of system prompts; the k-th most popular one has a probability proportional to 1 / k.
        system, user: tokens of system prompts and of users' messages.
        generate: tokens of answers.
    """

    prompts: int
    system: Lengths
    user: Lengths
    generate: Lengths


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """Sessions of agents. Each turn repeats the session so far and adds to it.

    Attributes:
        agents: number of agents, equally popular; the sessions of one begin with the same system prompt and tools.
        system: tokens of these.
        turns: mean number of turns, geometrically distributed.
        added: tokens that a turn adds, such as the result of a tool.
        generate: tokens of answers.
        answer_seconds: expected time of an answer without its tokens, and of a token.
        pause: mean seconds between an answer and the next turn, exponentially distributed.
    """

    agents: int
    system: Lengths
    turns: float
    added: Lengths
    generate: Lengths
    answer_seconds: tuple[float, float]
    pause: float


SHARED_PROMPTS: Final = SharedPrompts(
    prompts=48,
    system=Lengths(8000, 10_000, 30_000),
    user=Lengths(200, 350, 4000),
    generate=Lengths(129, 211, 1000),
)
AGENTS: Final = AgentSessions(
    agents=4,
    system=Lengths(6000, 6500, 12_000),
    turns=12.0,
    added=Lengths(400, 900, 8000),
    generate=Lengths(80, 150, 1000),
    answer_seconds=(1.0, 0.04),
    pause=8.0,
)


def shared_prompts(
    load: SharedPrompts, seconds: float, rate: Rate, highest: float
) -> Callable[[int], Iterator[Arrival]]:
    """A Poisson process with a varying rate of requests per second."""

    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        number = itertools.count(1)
        systems = [_blocks(number, load.system.draw(rng)) for _ in range(load.prompts)]
        weights = [1 / (k + 1) for k in range(load.prompts)]
        for now in _times(rng, seconds, rate, highest):
            (system,) = rng.choices(systems, weights)
            prompt = len(system) * BLOCK_TOKENS + load.user.draw(rng)
            generate = load.generate.draw(rng)
            blocks = _continued(number, system, prompt + generate)
            yield Arrival(now, prompt, generate, blocks, opening=blocks[-1])

    return make


def agent_sessions(
    load: AgentSessions, seconds: float, rate: Rate, highest: float
) -> Callable[[int], Iterator[Arrival]]:
    """Sessions that begin as a Poisson process with a varying rate per second."""

    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        number = itertools.count(1)
        systems = [_blocks(number, load.system.draw(rng)) for _ in range(load.agents)]
        turns: list[tuple[float, int, Arrival]] = []
        for now in _times(rng, seconds, rate, highest):
            while turns and turns[0][0] <= now:
                yield heapq.heappop(turns)[2]
            blocks, opening, time = rng.choice(systems), next(number), now
            tokens = len(blocks) * BLOCK_TOKENS
            while time < seconds:
                prompt, generate = tokens + load.added.draw(rng), load.generate.draw(rng)
                tokens = prompt + generate
                if tokens > _MOST_TOKENS:
                    break
                blocks = _continued(number, blocks, tokens)
                heapq.heappush(turns, (time, next(number), Arrival(time, prompt, generate, blocks, opening)))
                if rng.random() < 1 / load.turns:
                    break
                before, token = load.answer_seconds
                time += before + token * generate + rng.expovariate(1 / load.pause)
        while turns:
            yield heapq.heappop(turns)[2]

    return make


def conversation_traces(seconds: float, scale: float = 1.0) -> tuple[Trace, ...]:
    """Return the traces, `seconds` long plus the warm-up, at `scale` times the load for three replicas."""
    whole = WARM_UP + seconds

    def rise(highest: float) -> tuple[float, Rate, float]:
        return whole, hump(scale * highest / 2, scale * highest, seconds), scale * highest

    system, added = SHARED_PROMPTS.system, AGENTS.added
    return (
        Trace(
            "shared-prompts", "48 system prompts of 10,000 tokens on average, each with the message of another user",
            whole, Mix(system, SHARED_PROMPTS.generate), shared_prompts(SHARED_PROMPTS, *rise(5.0)),
        ),
        Trace(
            "agent-sessions", "sessions of 12 turns on average that repeat all before and add 900 tokens each",
            whole, Mix(added, AGENTS.generate), agent_sessions(AGENTS, *rise(0.3)),
        ),
        Trace(
            "no-prefixes", "lengths of Azure's conversation trace; no prompt shares a prefix with another",
            whole, AZURE_CONVERSATION, _unshared(*rise(11.0)),
        ),
    )  # fmt: skip


def _unshared(seconds: float, rate: Rate, highest: float) -> Callable[[int], Iterator[Arrival]]:
    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        for number, now in enumerate(_times(rng, seconds, rate, highest)):
            yield Arrival(
                now, AZURE_CONVERSATION.prompt.draw(rng), AZURE_CONVERSATION.generate.draw(rng), opening=number
            )

    return make


def _times(rng: random.Random, seconds: float, rate: Rate, highest: float) -> Iterator[float]:
    """Yield the times of a Poisson process with a varying rate, by thinning; the warm-up has the initial rate."""
    now = rng.expovariate(highest)
    while now < seconds:
        if rng.random() * highest < rate(max(0.0, now - WARM_UP)):
            yield now
        now += rng.expovariate(highest)


def _blocks(number: Iterator[int], tokens: int) -> tuple[int, ...]:
    return tuple(itertools.islice(number, -(-tokens // BLOCK_TOKENS)))


def _continued(number: Iterator[int], blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the blocks of a text with `tokens` that begins with other blocks."""
    return blocks + tuple(itertools.islice(number, tokens // BLOCK_TOKENS - len(blocks)))
