"""Work items of the attention of decodes and of prompt chunks."""

from __future__ import annotations

import numpy as np
import pytest

from fastgen.kernels.cpu.attention.work_items import PART, DecodeItems, cut_chunks


@pytest.mark.parametrize("window", [None, 1, 64, 700])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("contexts", [[1], [512], [513], [8192], [8000, 1, 700], [64] * 40, [5000] + [30] * 100])
def test_items_cover_every_visible_key_of_every_head_once(
    contexts: list[int], num_threads: int, window: int | None
) -> None:
    heads = 3
    work = DecodeItems.cut(
        np.array(contexts), np.arange(len(contexts)) * 1000, num_kv_heads=heads, num_threads=num_threads, window=window
    )
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row, head, table, begin, end, part, visible in work.items.tolist():
        assert table == row * 1000
        assert begin % 64 == 0
        assert begin < end
        assert visible == max(contexts[row] - (window or contexts[row]), 0)
        covered.setdefault((row, head), []).append((begin, end, part))
    assert covered.keys() == {(row, head) for row in range(len(contexts)) for head in range(heads)}
    for (row, _), runs in covered.items():
        runs.sort()
        first = max(contexts[row] - (window or contexts[row]), 0) // 64 * 64
        assert [begin for begin, _, _ in runs] == [first, *(end for _, end, _ in runs[:-1])]
        assert runs[-1][1] == contexts[row]
    merged = {(row, head): list(range(first, first + count)) for row, head, first, count in work.merges.tolist()}
    assert merged == {key: [part for *_, part in runs] for key, runs in covered.items() if len(runs) > 1}
    assert sorted(part for parts in merged.values() for part in parts) == list(range(work.num_parts))


def test_the_split_of_a_context_does_not_depend_on_others() -> None:
    """Merging other parts would change the last bits, and sometimes a token."""

    def cut_of_the_first(contexts: list[int], num_threads: int) -> list[tuple[int, int, int]]:
        items = DecodeItems.cut(
            np.array(contexts), np.zeros(len(contexts), np.int64), num_kv_heads=3, num_threads=num_threads
        ).items
        return sorted((head, begin, end) for row, head, _, begin, end, _, _ in items.tolist() if row == 0)

    for context in (2000, 700, 5000):
        alone = cut_of_the_first([context], 2)
        assert cut_of_the_first([context, *[3000] * 7], 2) == alone
        assert cut_of_the_first([context, 1, 8000], 16) == alone
    assert len(cut_of_the_first([2000], 2)) == 12


def test_contexts_are_split_at_the_same_keys_whatever_their_length() -> None:
    """Tokens of a chunk and decodes at the same positions have the same parts."""
    for window in (None, 700):
        for context in (1, PART, PART + 1, 3 * PART - 1, 3 * PART + 5):
            items = DecodeItems.cut(
                np.array([context]), np.zeros(1, np.int64), num_kv_heads=1, num_threads=2, window=window
            ).items
            begins = sorted(items[:, 3].tolist())
            assert begins[1:] == list(range(-(-(begins[0] + 1) // PART) * PART, context, PART))


def test_threads_get_equal_shares_of_the_keys_of_decodes() -> None:
    contexts = np.array([2000] * 8 + [64] * 8)
    items = DecodeItems.cut(contexts, np.zeros(16, np.int64), num_kv_heads=3, num_threads=2).items
    keys = items[:, 4] - items[:, 3]
    half = (len(items) + 1) // 2
    assert abs(int(keys[:half].sum()) - int(keys[half:].sum())) <= 512


def test_a_step_without_decodes_has_no_items() -> None:
    nothing = np.empty(0, np.int64)
    work = DecodeItems.cut(nothing, nothing, num_kv_heads=3, num_threads=2)
    assert (len(work.items), len(work.merges), work.num_parts) == (0, 0, 0)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("lanes", [24, 48])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tokens", [[2], [24], [25], [300, 2, 47]])
def test_items_cover_every_query_of_every_head_once(
    tokens: list[int], group: int, lanes: int, num_threads: int
) -> None:
    spans = np.array([(100 * index, count, 7 * index, 50 * index) for index, count in enumerate(tokens)])
    items = cut_chunks(spans, lanes=lanes, num_kv_heads=2, group=group, num_threads=num_threads, window=9)
    assert set(map(tuple, items[:, :4].tolist())) == set(map(tuple, spans.tolist()))
    assert (items[:, 6] == 9).all()
    covered = sorted((row, head, first) for row, _, _, _, head, first, _ in items.tolist())
    assert covered == [
        (100 * index, head, first)
        for index, count in enumerate(tokens)
        for head in range(2)
        for first in range(0, count * group, lanes)
    ]


def test_threads_get_equal_shares_of_the_keys_of_a_chunk() -> None:
    items = cut_chunks(np.array([(0, 240, 0, 0)]), lanes=24, num_kv_heads=3, group=3, num_threads=2)
    keys = items[:, 2] + items[:, 5] // 3
    half = (len(items) + 1) // 2
    assert abs(int(keys[:half].sum()) - int(keys[half:].sum())) <= 240


def test_a_step_without_chunks_has_no_items() -> None:
    items = cut_chunks(np.empty((0, 4), np.int64), lanes=24, num_kv_heads=3, group=3, num_threads=2)
    assert items.shape == (0, 7)
