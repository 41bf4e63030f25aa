"""Copies between host and device through pinned memory, without waiting for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a GPU through pinned memory, without waiting. On a CPU, return a view of it."""
    return _pinned(values, device).to(device, non_blocking=True)


def upload_into(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy an array to a tensor of its shape and type, as `upload` does."""
    target.copy_(_pinned(values, target.device), non_blocking=True)


def _pinned(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the values in pinned memory if `device` is a GPU; torch reuses it only after the copy is done."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host."""

    tensor: torch.Tensor
    arrived: torch.cuda.Event | None

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would not wait. It raises an error of the GPU, too."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor


def download(values: torch.Tensor) -> HostCopy:
    """Start copying a tensor from a GPU to pinned memory. On a CPU it is copied at once: a graph may overwrite it."""
    if values.device.type != "cuda":
        return HostCopy(values.clone(), None)
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    # Otherwise the wait would spin, and take a core from grammars and the HTTP process for most of a step.
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record()
    return HostCopy(copy, arrived)
