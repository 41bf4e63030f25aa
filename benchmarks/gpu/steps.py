"""Steps of chosen shapes through a runner, without a scheduler."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from benchmarks.gpu.models import Ours
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model.step_input import StepInputBuilder
from fastgen.runner.gpu_runner import GPUTicket

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Steps:
    """One step, to be repeated: each sequence computes its last tokens again, and samples.

    Args:
        ours: the model.
        sequences: tokens of each sequence in the step, and its length after it.
        sampling: of all sequences.

    Attributes:
        first: its input for a runner that does not know the sequences.
        step: its input from then on.
    """

    def __init__(self, ours: Ours, sequences: SequenceOf[tuple[int, int]], sampling: SamplingParams = GREEDY) -> None:
        self._runner = ours.runner
        size, cache = ours.cache.block_size, ours.cache
        needed = sum(-(-length // size) for _, length in sequences)
        if needed > cache.num_blocks:
            raise MemoryError(f"the step needs {needed} blocks of {size} tokens, the cache has {cache.num_blocks}")
        blocks = random.Random(0).sample(range(cache.num_blocks), needed)
        chunks = []
        for number, (count, length) in enumerate(sorted(sequences, key=lambda sequence: sequence[0] > 1)):
            tokens = random_tokens(length, ours.runner.vocab_size, number)
            request = Request(id=str(number), prompt_token_ids=tokens, sampling=sampling)
            sequence = Sequence(request, ordinal=number, arrival=0.0, seed=number)
            sequence.block_table = [blocks.pop() for _ in range(-(-length // size))]
            sequence.num_computed_tokens = length - count
            chunks.append(Chunk(sequence, length - count, count))
        builder, plan = StepInputBuilder(size), StepPlan(tuple(chunks))
        self.step = self.first = builder.build(plan)
        self.run()
        self.step = builder.build(plan)

    def run(self) -> None:
        """Run the step and wait for its results."""
        ticket = self._runner.launch(self.step)
        ticket.sample([])
        ticket.result()

    def seconds_ahead(self, seconds: float) -> float:
        """Return the median time between results when each step is launched before the results of the last."""
        in_flight, arrivals = deque([self._launch()]), list[float]()
        end = time.perf_counter() + seconds
        while len(arrivals) < 6 or time.perf_counter() < end:
            in_flight.append(self._launch())
            in_flight.popleft().result()
            arrivals.append(time.perf_counter())
        in_flight.popleft().result()
        return statistics.median(after - before for before, after in pairwise(arrivals[1:]))

    def _launch(self) -> GPUTicket:
        ticket = self._runner.launch(self.step)
        ticket.sample([])
        return ticket


def random_tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    """Return token ids that are no special tokens of a small id."""
    return random.Random(seed).choices(range(3, vocabulary), k=count)
