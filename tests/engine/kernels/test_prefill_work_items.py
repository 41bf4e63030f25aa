"""Work items of chunk attention."""

from __future__ import annotations

import numpy as np
import pytest

from fastgen.kernels.cpu import prefill_work_items


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("lanes", [24, 48])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tokens", [[2], [24], [25], [300, 2, 47]])
def test_items_cover_every_query_of_every_head_once(
    tokens: list[int], group: int, lanes: int, num_threads: int
) -> None:
    spans = np.array([(100 * index, count, 7 * index, 50 * index) for index, count in enumerate(tokens)])
    items = prefill_work_items.cut(spans, lanes=lanes, num_kv_heads=2, group=group, num_threads=num_threads, window=9)
    assert set(map(tuple, items[:, :4].tolist())) == set(map(tuple, spans.tolist()))
    assert (items[:, 6] == 9).all()
    covered = sorted((row, head, first) for row, _, _, _, head, first, _ in items.tolist())
    assert covered == [
        (100 * index, head, first)
        for index, count in enumerate(tokens)
        for head in range(2)
        for first in range(0, count * group, lanes)
    ]


def test_threads_get_equal_shares_of_the_keys() -> None:
    items = prefill_work_items.cut(np.array([(0, 240, 0, 0)]), lanes=24, num_kv_heads=3, group=3, num_threads=2)
    keys = items[:, 2] + items[:, 5] // 3
    half = (len(items) + 1) // 2
    assert abs(int(keys[:half].sum()) - int(keys[half:].sum())) <= 240


def test_a_step_without_chunks_has_no_items() -> None:
    items = prefill_work_items.cut(np.empty((0, 4), np.int64), lanes=24, num_kv_heads=3, group=3, num_threads=2)
    assert items.shape == (0, 7)
