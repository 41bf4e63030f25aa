"""Overhead of scheduling and input preparation per step, by part: `python benchmarks/scheduling.py`.

All sequences decode, over contexts of random length; blocks are allocated and become full as in serving. Each figure is
the median of many steps; other load on the machine only makes it larger. The last line is what the prefix cache adds to
a step if it never hits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict

from fastgen.core.block_pool import BlockPool
from fastgen.core.chunking import AutomaticTarget, Chunker
from fastgen.core.request import Request, SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepModel
from fastgen.model.forward_input import HostRows
from fastgen.model.step_input import StepInputBuilder

BLOCK_SIZE = 64
PARTS = ("schedule", "input", "rows", "settle", "stats")


def filled(sequences: int, context: int, *, salt: str | None) -> Scheduler:
    """Return a scheduler whose sequences all decode, over about `context` tokens each."""
    rng = random.Random(0)
    times = StepModel()
    scheduler = Scheduler(
        BlockPool(sequences * (context // 16), BLOCK_SIZE),
        token_budget=max(sequences, 8192),
        max_sequences=sequences,
        end_tokens=frozenset(),
        chunker=Chunker("even", AutomaticTarget(times)),
    )
    for number in range(sequences):
        prompt = [rng.randrange(30_000) for _ in range(rng.randint(context // 2, context * 3 // 2))]
        request = Request(id=str(number), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=context))
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.cache_salt = salt
        scheduler.add(sequence)
    while scheduler.waiting or not all(sequence.is_decoding for sequence in scheduler.running):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.settle(plan, [1 for chunk in plan.chunks if chunk.samples])
    return scheduler


def measure(scheduler: Scheduler, steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part."""
    taken: dict[str, list[float]] = defaultdict(list)
    builder, rows = StepInputBuilder(BLOCK_SIZE), HostRows(BLOCK_SIZE)
    for _ in range(steps):
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        assert plan is not None
        marks.append(time.perf_counter())
        step = builder.build(plan)
        marks.append(time.perf_counter())
        rows.apply(step)
        marks.append(time.perf_counter())
        scheduler.settle(plan, [token % 1000 for token in range(len(plan.chunks))])
        marks.append(time.perf_counter())
        scheduler.stats(0.0)
        marks.append(time.perf_counter())
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            taken[part].append((end - begin) * 1000)
    return {part: statistics.median(values) for part, values in taken.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    print("sequences  schedule     input      rows    settle     stats  all but stats  (ms per step, median)")
    for sequences in given.sequences:
        parts = measure(filled(sequences, given.context, salt=""), given.steps)
        whole = sum(parts.values()) - parts["stats"]
        print(f"{sequences:9}" + "".join(f"{parts[part]:10.3f}" for part in PARTS) + f"{whole:15.3f}")
    with_cache = measure(filled(given.sequences[-1], given.context, salt=""), given.steps)
    without = measure(filled(given.sequences[-1], given.context, salt=None), given.steps)
    added = sum(with_cache.values()) - sum(without.values())
    print(f"the prefix cache without hits adds {added:.3f} ms per step at {given.sequences[-1]} sequences")


if __name__ == "__main__":
    main()
