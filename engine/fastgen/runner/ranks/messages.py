"""What rank 0 tells the other ranks: each message is one array of int32, without objects to encode.

Sampling parameters and grammar masks stay on rank 0, which samples.
"""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fastgen.model.step_input import StepInput

IntArray = npt.NDArray[np.int32]


class MessageKind(IntEnum):
    """The first element of a message."""

    STEP = 0
    PREFAULT = 1
    END = 2
    STEP_WITH_LISTS = 3  # whose sampling no graph contains; of GPUs only
    PREPARE = 4  # graphs for a token budget


_ARRAYS = tuple(field.name for field in fields(StepInput) if field.name not in ("new_rows", "num_decodes"))
_SHAPES = {
    "swap_out": (-1, 2),
    "swap_in": (-1, 2),
    "table_updates": (3, -1),
    "window_updates": (3, -1),
    "state_saves": (-1, 3),
}
_HEADER = 2 + len(_ARRAYS)  # kind, number of decodes, and the size of each array


def pack(step: StepInput, kind: MessageKind = MessageKind.STEP) -> IntArray:
    """Return the message for a step, without `new_rows`."""
    arrays = [getattr(step, name) for name in _ARRAYS]
    header = np.array([kind, step.num_decodes, *(array.size for array in arrays)], np.int32)
    return np.concatenate([header, *(array.ravel() for array in arrays)])


def unpack(message: IntArray) -> StepInput:
    """Return the step of a message, with no `new_rows`."""
    ends = np.cumsum(message[2:_HEADER]) + _HEADER
    arrays = np.split(message, [_HEADER, *ends.tolist()])[1:-1]
    values = {name: array.reshape(_SHAPES.get(name, -1)) for name, array in zip(_ARRAYS, arrays, strict=True)}
    return StepInput(new_rows=(), num_decodes=int(message[1]), **values)
