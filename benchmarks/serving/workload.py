"""The closed loop that every contender runs, and what is measured of it. Standard library only: peers have their own
environments.

Shape as in DeepSpeed-FastGen's evaluation (Holmes et al., 2024): C clients send one request after another; lengths of
prompts and generations are normal with a deviation of 30 % of their mean. Prompts are token ids, the same for all.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

DEVIATION = 0.3
# Ids that are words or parts of them in SmolLM2's vocabulary, not marks.
TOKEN_IDS = range(1000, 40000)


@dataclass(frozen=True)
class Job:
    """One request: a prompt and how many tokens to generate."""

    prompt: list[int]
    generate: int


@dataclass(frozen=True)
class Workload:
    """What the clients send."""

    clients: int = 8
    requests: int = 6
    prompt: int = 512
    generate: int = 64
    seed: int = 0

    def client(self, number: int) -> Iterator[Job]:
        """The requests of one client, one after another."""
        rng = random.Random(self.seed * 1000 + number)
        for _ in range(self.requests):
            length = max(8, int(rng.gauss(self.prompt, DEVIATION * self.prompt)))
            generate = max(4, int(rng.gauss(self.generate, DEVIATION * self.generate)))
            yield Job(rng.choices(TOKEN_IDS, k=length), generate)

    def warm_up(self) -> Job:
        """A request for before the clock starts."""
        return Job(random.Random(-1).choices(TOKEN_IDS, k=300), 8)


@dataclass
class Trace:
    """One request as its client saw it: when it was sent, when tokens came, and how many (a server may send two that
    make one character at once)."""

    prompt_tokens: int
    sent: float
    tokens: list[float] = field(default_factory=list)
    generated: int = 0


def summary(name: str, traces: list[Trace]) -> dict[str, float | str]:
    """Rates and latencies of a run; `gap` is the time between two tokens of one request, every one of them counted."""
    wall = max(t.tokens[-1] for t in traces) - min(t.sent for t in traces)
    prompt, generated = sum(t.prompt_tokens for t in traces), sum(max(t.generated, len(t.tokens)) for t in traces)
    first = sorted(t.tokens[0] - t.sent for t in traces)
    gaps = sorted(later - earlier for t in traces for earlier, later in zip(t.tokens, t.tokens[1:], strict=False))
    return {
        "name": name,
        "requests": len(traces),
        "seconds": round(wall, 2),
        "tokens_per_second": round((prompt + generated) / wall, 1),
        "generated_per_second": round(generated / wall, 1),
        "first_p50": round(quantile(first, 0.5), 3),
        "first_p95": round(quantile(first, 0.95), 3),
        "gap_p50": round(quantile(gaps, 0.5), 4),
        "gap_p99": round(quantile(gaps, 0.99), 4),
        "gap_max": round(gaps[-1], 4),
    }


def quantile(ordered: list[float], share: float) -> float:
    """The value that `share` of the ordered ones do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a workload."""
    for name in ("clients", "requests", "prompt", "generate", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Workload, name))


def of_arguments(options: argparse.Namespace) -> Workload:
    """The workload that the flags say."""
    return Workload(options.clients, options.requests, options.prompt, options.generate, options.seed)


def report(name: str, traces: list[Trace]) -> None:
    """Prints the summary as one line of JSON, the last line of a contender's output."""
    print(json.dumps(summary(name, traces)), flush=True)
