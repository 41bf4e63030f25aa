"""Add up the last hidden states of the tokens that are pooled, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastgen.kernels.gpu.transfers import upload
from fastgen.model.step_input import StepInput


def pool(step: StepInput, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of each pooled sequence's hidden states [G, hidden] float32; None if there are none.

    Does not wait for the device. The order of the additions does not depend on what else is in the step.

    Args:
        step: the step, with Q tokens to pool.
        hidden: [Q or more, hidden], the hidden states of `step.pooled_tokens`; further rows are padding.
    """
    num_tokens, num_sequences = len(step.pooled_tokens), len(step.pooled)
    if not num_tokens:
        return None
    states = hidden[:num_tokens].to(torch.float32, copy=True)  # the next step overwrites a graph's output
    if num_tokens == num_sequences:
        return states
    lengths = upload(np.diff(step.pooled_starts), hidden.device)
    return torch.segment_reduce(states, "sum", lengths=lengths, axis=0, unsafe=True)


def sums_by_sequence(step: StepInput, sums: torch.Tensor | None) -> dict[int, Any]:
    """Return the sums [hidden] by index of the sequence, for the result of `pool`, copied to the host."""
    if sums is None:
        return {}
    return dict(zip(step.pooled.tolist(), sums.numpy(), strict=True))
