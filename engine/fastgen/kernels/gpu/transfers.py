"""Copies between host and device through pinned memory, without waiting for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device through pinned memory, without waiting for the copy."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host."""

    tensor: torch.Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor


def download(values: torch.Tensor) -> HostCopy:
    """Start copying a tensor to pinned memory."""
    if values.device.type != "cuda":
        return HostCopy(values, None)
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return HostCopy(copy, arrived)
