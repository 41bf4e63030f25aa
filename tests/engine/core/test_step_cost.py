"""The host's work for a step, as lines of Python that it runs: the same on every machine, unlike its time.

`python -m benchmarks.scheduling` measures the time.
"""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import numpy as np
from benchmarks.scheduling import InstantRunner, requests

from fastgen.engine.core import Engine
from fastgen.model.step_input import StepInput
from fastgen.settings import EngineConfig

# For a sequence that decodes, in a block that has room.
MOST_LINES_PER_SEQUENCE = 33


class Recorder(InstantRunner):
    """A device that keeps the last step."""

    last: StepInput

    def launch(self, step: StepInput) -> Any:
        self.last = step
        return super().launch(step)


def lines_of_a_step(engine: Engine) -> int:
    """Return the lines that a step runs."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.step()
    finally:
        sys.settrace(before)
    return lines


def least_work(sequences: int, context: int) -> tuple[int, int]:
    """Return the fewest lines of a step in which all sequences decode, and the bytes of its input."""
    runner = Recorder(num_blocks=sequences * (context // 16 + 8), max_model_length=4 * context)
    # Not real time, which the tracing of lines changes: steps that take longer than expected are fitted at once.
    clock = itertools.count().__next__
    engine = Engine(runner, EngineConfig(model="", token_budget=1024, max_sequences=sequences), clock)
    for request in requests(sequences, context):
        engine.add(request)
    while len(engine.step().outputs) < sequences:
        pass
    found = []
    for _ in range(12):  # in some of them a block becomes full
        lines = lines_of_a_step(engine)
        arrays = [getattr(runner.last, name) for name in StepInput.__slots__]
        found.append((lines, sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))))
    return min(found)


def test_the_work_for_a_decode_is_bounded_and_does_not_depend_on_its_context() -> None:
    (few, _), (many, num_bytes) = least_work(8, 128), least_work(16, 128)
    long, num_bytes_long = least_work(16, 4096)
    assert num_bytes == num_bytes_long
    assert abs(long - many) < 16, "more than a line for each sequence; the fit of step times takes a few more or less"
    assert (many - few) / 8 <= MOST_LINES_PER_SEQUENCE
