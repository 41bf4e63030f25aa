"""Interface of a runner, as the engine uses it. This module must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastgen.core.blocks.window_pool import WindowGroup
from fastgen.core.step_output import StepOutput
from fastgen.model.step_input import StepInput

Mask = npt.NDArray[np.uint32]


class Ticket(Protocol):
    """A step that was launched. Call `sample` once, then `result` once."""

    def sample(self, masks: list[Mask]) -> None:
        """Sample the tokens of the step. A runner that overlaps steps only enqueues this, and does not wait.

        Args:
            masks: the tokens that grammars allow, for each of `StepInput.masked`; see `Constraint.fill_mask`.
        """

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""


@dataclass(frozen=True, slots=True)
class CompletedTicket:
    """The ticket of a runner whose `launch` computes the results, as simulated devices do."""

    output: StepOutput

    def sample(self, masks: list[Mask]) -> None:
        """Ignore the masks: the step has been sampled."""

    def result(self) -> StepOutput:
        """Return the results."""
        return self.output


class Runner(Protocol):
    """Runs steps on a device. Owns the weights, the KV cache tensors and the state of running sequences.

    Attributes:
        steps_in_flight: steps that may be launched before the results of the first are read; 1 without overlap.
        vocab_size: token ids are in `range(vocab_size)`.
        eos_token_ids: tokens that end a generation.
        num_blocks, block_size: of the KV cache; the size is in token slots.
        num_host_blocks: blocks of the host buffer for swapped sequences; 0 without one.
        num_state_slots: slots for the recurrent states of sequences; 0 for a model without them.
        window_group: the blocks of layers with a sliding window; None if they have none of their own.
        seconds_per_block: seconds to copy a block between cache and host buffer, one way; 0 without one.
        max_model_length: longest prompt plus generation of one request; it fits in the KV cache.
    """

    steps_in_flight: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    block_size: int
    num_host_blocks: int
    num_state_slots: int
    window_group: WindowGroup | None
    seconds_per_block: float
    max_model_length: int

    def launch(self, step: StepInput) -> Ticket:
        """Start a step: its swaps, its state updates and its forward pass.

        On a GPU they are enqueued, and may still run on return. On a CPU they are done on return.
        """
