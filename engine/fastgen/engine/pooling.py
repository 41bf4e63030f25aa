"""Results of requests that are pooled instead of sampled, put together from the results of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.core.sequence import Sequence
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Pools:
    """The unfinished pooled sequences of one step, and what the step has computed for them.

    Attributes:
        entries: each sequence with the log-probabilities that the step has reported of it.
    """

    entries: list[tuple[Sequence, list[TokenLogprobs]]]

    @classmethod
    def of(cls, plan: StepPlan, result: StepOutput) -> Pools:
        """Add the step's hidden states to each sequence's sum. Call it before the step is settled."""
        entries = []
        for index in range(plan.num_continued, len(plan.sequences)):
            sequence = plan.sequences[index]
            if sequence.pooling is None or sequence.finish_reason is not None:
                continue
            if index in result.pooled:
                _add(sequence, plan.starts[index], result.pooled[index])
            entries.append((sequence, result.prompt_logprobs.get(index, [])))
        return cls(entries)

    def finished(self) -> Iterator[tuple[Sequence, bytes]]:
        """Yield the sequences that the step has finished, with their results as in `TokenOutput`."""
        for sequence, logprobs in self.entries:
            if sequence.finish_reason is not None:
                yield sequence, np.ascontiguousarray(_result(sequence, logprobs), "<f4").tobytes()


def _add(sequence: Sequence, start: int, states: npt.NDArray[Any]) -> None:
    """Add the sum of the hidden states from token `start` on.

    A recomputed sequence starts again at token 0.
    """
    is_first = start == 0 or sequence.pooled_sum is None
    sequence.pooled_sum = states if is_first else sequence.pooled_sum + states


def _result(sequence: Sequence, logprobs: list[TokenLogprobs]) -> Any:
    assert sequence.pooling is not None
    match sequence.pooling.method:
        case "last":
            return sequence.pooled_sum
        case "mean":
            return sequence.pooled_sum / np.float32(sequence.num_prompt_tokens)
        case "logprobs":
            return [entry.logprob for entry in logprobs]
