"""What a runner is told of a sequence when the sequence gets a row."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RowParameters:
    """How the tokens of one row are sampled.

    Attributes:
        row: index of the row in the runner's state.
        sampling: the request's parameters.
        seed: seed of its random numbers, 0 to 2^63 - 1.
        num_prompt_tokens: length of the prompt in `tokens`.
        tokens: the sequence so far, prompt first.
    """

    row: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    tokens: list[int]
