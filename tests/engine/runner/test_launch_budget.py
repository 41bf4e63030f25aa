"""Launches of a step on the code path of a GPU, counted as dispatched operations; an operator of ours is one launch."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.launches import SAMPLING, Counting, count_launches

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
    assert counting.launches == {"zero_": 1, "sum": 1}
    assert counting.waits.total() == 1
