"""Workloads: prompts and generations of random length."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

# Common words, about one token each in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed-loop load: each client sends its next request when its previous one ends.

    Attributes:
        requests: total number of requests.
        clients: number of concurrent clients.
        prompt_tokens, generation_tokens: mean lengths.
        deviation: standard deviation of both, as a share of the mean; lengths are drawn from a normal distribution.
        seed: the same seed gives the same requests.
    """

    requests: int
    clients: int
    prompt_tokens: int
    generation_tokens: int
    deviation: float
    seed: int

    def asks(self) -> list[Ask]:
        """Return every request, in order."""
        draw = random.Random(self.seed)
        return [
            Ask(
                " ".join(draw.choice(_WORDS) for _ in range(self._length(draw, self.prompt_tokens))),
                self._length(draw, self.generation_tokens),
            )
            for _ in range(self.requests)
        ]

    def warm_up(self) -> Workload:
        """Return a workload of one short request to run before the clock starts: a process's first step is slow."""
        return replace(self, requests=1, clients=1, prompt_tokens=256, generation_tokens=8, seed=-1 - self.seed)

    def _length(self, draw: random.Random, mean: int) -> int:
        return max(1, round(draw.gauss(mean, self.deviation * mean)))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt of about one token per word, and the number of tokens to generate."""

    text: str
    max_tokens: int
