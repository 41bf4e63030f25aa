"""Host time of a step without the device: `python -m benchmarks.scheduling`.

All sequences decode, over contexts of random length; blocks are allocated and become full as in serving. The first
table is the engine's loop with two steps in flight, over a runner that returns prepared results: scheduling, the input
of the step, settling, and the report with one output for each sequence. The second one times its parts, with `rows`,
which a runner on CPUs adds, and the prefix cache, which never hits here.

Times are CPU time of the thread, so other load on the machine counts only as far as it slows the processor down. The
minimum of many steps is the figure to compare. The reports are not encoded.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.chunking import AutomaticTarget, Chunker
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepModel
from fastgen.core.step_output import StepOutput
from fastgen.engine.core import Engine
from fastgen.model.forward_input import HostRows
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.interface import CompletedTicket
from fastgen.settings import EngineConfig

BLOCK_SIZE = 64
VOCABULARY = 30_000
PARTS = ("schedule", "input", "rows", "settle", "stats")


@dataclass
class InstantRunner:
    """A device whose results are there at once, with two steps in flight."""

    num_blocks: int
    max_model_length: int
    block_size: int = BLOCK_SIZE
    vocab_size: int = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset({0})
    num_host_blocks: int = 0
    num_state_slots: int = 0
    window_group: None = None
    seconds_per_block: float = 0.0
    steps_in_flight: int = 2
    seconds: float = 0.0  # spent here, which is not the engine's

    def launch(self, step: StepInput) -> CompletedTicket:
        """Return a ticket with a token for each sequence."""
        began = time.thread_time()
        ticket = CompletedTicket(StepOutput([1 + index % 1000 for index in range(len(step.sampled))]))
        self.seconds += time.thread_time() - began
        return ticket


def requests(sequences: int, context: int) -> list[Request]:
    """Return requests with prompts of `context` / 2 to `context` * 3 / 2 tokens, and as many tokens to generate."""
    rng = random.Random(0)
    lengths = [rng.randint(context // 2, context * 3 // 2) for _ in range(sequences)]
    return [
        Request(
            id=f"cmpl-{number:032d}",
            prompt_token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
            sampling=SamplingParams(max_tokens=context),
        )
        for number, length in enumerate(lengths)
    ]


def measure_engine(sequences: int, context: int, steps: int) -> list[float]:
    """Return the host's milliseconds of each of many engine steps in which all sequences decode, in order of size."""
    runner = InstantRunner(num_blocks=sequences * (context // 16), max_model_length=4 * context)
    engine = Engine(runner, EngineConfig(model="", token_budget=8192, max_sequences=sequences))
    for request in requests(sequences, context):
        engine.add(request)
    while len(engine.step().outputs) < sequences:
        pass
    gc.freeze()  # as the engine process does when it has loaded its model
    taken = []
    for _ in range(steps):
        runner.seconds, began = 0.0, time.thread_time()
        report = engine.step()
        taken.append((time.thread_time() - began - runner.seconds) * 1000)
        assert len(report.outputs) == sequences
    gc.unfreeze()
    return sorted(taken)


def filled(sequences: int, context: int, *, salt: str | None) -> Scheduler:
    """Return a scheduler whose sequences all decode, over about `context` tokens each."""
    times = StepModel()
    scheduler = Scheduler(
        BlockPool(sequences * (context // 16), BLOCK_SIZE),
        token_budget=max(sequences, 8192),
        max_sequences=sequences,
        end_tokens=frozenset(),
        chunker=Chunker("even", AutomaticTarget(times)),
    )
    for number, request in enumerate(requests(sequences, context)):
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.cache_salt = salt
        scheduler.add(sequence)
    builder = StepInputBuilder(BLOCK_SIZE)
    while scheduler.waiting or not all(sequence.is_decoding for sequence in scheduler.running):
        plan = scheduler.schedule()
        assert plan is not None
        builder.build(plan)
        scheduler.settle(plan, [1] * sum(plan.samples))
    for sequence in scheduler.running:
        builder.release(sequence)
    return scheduler


def measure_parts(scheduler: Scheduler, steps: int) -> dict[str, float]:
    """Return the minimum milliseconds of each part."""
    taken: dict[str, list[float]] = defaultdict(list)
    builder, rows = StepInputBuilder(BLOCK_SIZE), HostRows(BLOCK_SIZE)
    for _ in range(steps):
        marks = [time.thread_time()]

        def mark(marks: list[float] = marks) -> None:
            marks.append(time.thread_time())

        _step(scheduler, builder, rows, mark)
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            taken[part].append((end - begin) * 1000)
    return {part: min(values) for part, values in taken.items()}


def _step(scheduler: Scheduler, builder: StepInputBuilder, rows: HostRows, mark: Callable[[], None]) -> None:
    """Run one step and call `mark` after each part."""
    plan = scheduler.schedule()
    assert plan is not None
    mark()
    step = builder.build(plan)
    mark()
    rows.apply(step)
    mark()
    scheduler.settle(plan, [token % 1000 for token in range(len(plan.sequences))])
    mark()
    scheduler.stats(0.0)
    mark()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    print("sequences  context   minimum    median  (ms per step of the engine)")
    for sequences in given.sequences:
        for context in given.contexts:
            taken = measure_engine(sequences, context, given.steps)
            print(f"{sequences:9}{context:9}{taken[0]:10.3f}{statistics.median(taken):10.3f}")
    print("\nsequences  context" + "".join(f"{part:>10}" for part in PARTS) + "  (minimum ms per step)")
    context = given.contexts[0]
    for sequences in given.sequences:
        parts = measure_parts(filled(sequences, context, salt=""), given.steps)
        print(f"{sequences:9}{context:9}" + "".join(f"{parts[part]:10.3f}" for part in PARTS))
    without = measure_parts(filled(given.sequences[-1], context, salt=None), given.steps)
    added = sum(parts.values()) - sum(without.values())
    print(f"the prefix cache without hits adds {added:.3f} ms per step at {given.sequences[-1]} sequences")


if __name__ == "__main__":
    main()
