"""What the prefix cache gives and costs: `python benchmarks/prefix_cache.py MODEL`.

Gives: time to first token of a second identical prompt, as a ratio to the first. Costs: the same load of prompts that
share nothing, with and without the cache, taking turns; the ratio of their wall times is what hashing and bookkeeping
take. Everything in one process, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from fastgen.config import EngineConfig
from fastgen.core.request import Request, SamplingParams
from fastgen.engine import Engine
from fastgen.model.loader import load_runner
from fastgen.model.source import ModelSource

TOKEN_IDS = range(1000, 40000)


def first_token_seconds(engine: Engine, number: str, prompt: list[int]) -> float:
    """From adding the prompt to its first token."""
    started = time.perf_counter()
    engine.add(Request(id=number, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=2)))
    while not engine.step().outputs:
        pass
    seconds = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return seconds


def wall_seconds(engine: Engine, prompts: list[list[int]]) -> float:
    """All prompts at once, 16 tokens each."""
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    """Measures both and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, token_budget=256)
    runner = load_runner(ModelSource.open(config.model), config, lambda _stage, _fraction: None)
    engines = {
        caching: Engine(runner, EngineConfig(model=config.model, token_budget=256, prefix_caching=caching))
        for caching in (True, False)
    }
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=length)

    ratios = []
    for number in range(options.rounds):
        same = prompt(options.tokens)
        first = first_token_seconds(engines[True], f"first {number}", same)
        ratios.append(first_token_seconds(engines[True], f"second {number}", same) / first)
    print(f"time to first token, second : first of two identical prompts of {options.tokens} tokens:", end=" ")
    print(f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})")

    costs = []
    for _ in range(options.rounds):
        prompts = [prompt(512) for _ in range(8)]
        seconds = {caching: wall_seconds(engine, prompts) for caching, engine in engines.items()}
        # The second engine must not find what the first one left: it has a cache of its own, and no prompt comes twice.
        costs.append(seconds[True] / seconds[False])
    print(f"wall time with : without the cache, nothing shared: {statistics.median(costs):.3f}", end=" ")
    print(f"(least {min(costs):.3f}, most {max(costs):.3f})")


if __name__ == "__main__":
    main()
