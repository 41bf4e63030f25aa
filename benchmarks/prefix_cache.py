"""Benefit and cost of the prefix cache: `python benchmarks/prefix_cache.py MODEL`.

Benefit: time to first token of a second identical prompt, relative to the first. Cost: wall time of prompts that share
nothing, with the cache relative to without, alternating which goes first. The cost of hashing and bookkeeping is far
below the noise of these runs, so it is also measured over a runner that computes nothing, and given as a fraction of
the real run's time. Everything runs in one process, under the same conditions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_output import StepOutput
from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import CompletedTicket, Runner
from fastgen.runner.loader import load_runner
from fastgen.settings import EngineConfig

TOKEN_IDS = range(1000, 40000)


class Idle:
    """A runner that computes nothing, with the dimensions of another runner."""

    def __init__(self, real: Runner) -> None:
        self.vocab_size, self.eos_token_ids = real.vocab_size, real.eos_token_ids
        self.num_blocks, self.block_size = real.num_blocks, real.block_size
        self.window_group = real.window_group
        self.num_host_blocks, self.num_state_slots, self.seconds_per_block, self.steps_in_flight = 0, 0, 0.0, 1
        self.max_model_length = real.max_model_length

    def launch(self, step: StepInput) -> CompletedTicket:
        """Return one token for every sequence that samples."""
        return CompletedTicket(StepOutput([7] * len(step.sampled)))


def first_token_seconds(engine: Engine, number: str, prompt: list[int]) -> float:
    """Return the time from adding the prompt to its first token."""
    started = time.perf_counter()
    engine.add(Request(id=number, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=2)))
    while not engine.step().outputs:
        pass
    seconds = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return seconds


def wall_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return the time for the prompt and 8 generated tokens."""
    started = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add(Request(id="only", prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print benefit and cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=240, help="number of short runs with and without the cache")
    options = parser.parse_args()
    # So little memory that all of it is prefaulted before the measurement. Without the prefix cache the same few blocks
    # are reused; with it new ones are, and their page faults would count as its cost.
    config = EngineConfig(model=options.model, token_budget=256, kv_cache_memory=1 << 30)
    runner = load_runner(ModelSource.open(config.model), config, lambda _stage, _fraction: None)
    runner.start_prefault()
    engines, idle = (
        {
            caching: Engine(one, EngineConfig(model=config.model, token_budget=256, prefix_caching=caching))
            for caching in (True, False)
        }
        for one in (runner, Idle(runner))
    )
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

    costs, bookkeeping = [], []
    for number in range(options.pairs):
        order = (True, False) if number % 2 else (False, True)
        fresh = prompt(256)
        # Each engine has its own cache, and no prompt occurs twice, so nothing is found.
        seconds = {caching: wall_seconds(engines[caching], fresh) for caching in order}
        costs.append(seconds[True] / seconds[False])
        alone = {caching: wall_seconds(idle[caching], fresh) for caching in order}
        bookkeeping.append((alone[True] - alone[False]) / seconds[False])
    for what, values in (("wall time with : without the cache", costs), ("its bookkeeping alone", bookkeeping)):
        low, _, high = statistics.quantiles(values, n=4)
        print(f"nothing shared, {what}: {statistics.median(values):.4f} (quartiles {low:.4f}, {high:.4f})")


if __name__ == "__main__":
    main()
