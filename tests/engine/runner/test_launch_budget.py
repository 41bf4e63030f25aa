"""Launches of a step on the code path of a GPU, counted as dispatched operations; an operator of ours is one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.gpu import launches
from benchmarks.gpu.launches import SAMPLING, Counting, count_launches

from fastgen.kernels.gpu import transfers

MOST_PER_LAYER = 9
MOST_OUTSIDE = 20
MOST_REPLAYED = 6  # the upload, the graph, the head, and three operators of the sampler


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_mixed_step_stays_within_its_launches_and_waits_for_nothing(sampling: str) -> None:
    counted = count_launches(SAMPLING[sampling])
    assert counted.per_layer <= MOST_PER_LAYER
    assert counted.outside <= MOST_OUTSIDE
    assert counted.replayed <= MOST_REPLAYED
    assert not counted.waits


def test_waits_and_launches_are_told_from_views_and_allocations() -> None:
    with Counting() as counting:
        total = torch.empty(4, 3).zero_().view(12)[2:].sum()
        total.item()
        total.tolist()
        total.cpu().numpy()
    assert counting.launches == {"zero_": 1, "sum": 1}
    assert counting.waits == {"_local_scalar_dense": 1, "tolist": 1, "cpu": 1, "numpy": 1}


def test_arrays_of_a_step_are_uploaded_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pin, pinning, made, unpinned = transfers._pinned, [False], [0], [0]

    def pin_and_record(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        pinning[0] = True
        tensor = pin(values, device)
        pinning[0] = False
        return tensor

    class HostTensors(Counting):
        """Counts the tensors made of arrays or numbers of the host."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.lift_fresh.default:
                made[0] += 1
                unpinned[0] += not pinning[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(transfers, "_pinned", pin_and_record)
    monkeypatch.setattr(launches, "Counting", HostTensors)
    count_launches(replace(SAMPLING["filters and a penalty"], logprobs=2))
    assert made[0] > 0
    assert unpinned[0] == 0


def test_an_upload_to_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    transfers._pinned(np.zeros(3), torch.device("cuda"))
    assert len(pinned) == 1
    transfers._pinned(np.zeros(3), torch.device("cpu"))
    assert len(pinned) == 1
