"""The work list of attention: every key of every row once, in equal shares, and the kernel's items are its twin's."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.kernels.gpu import attention_tiles
from fastgen.kernels.gpu.attention_tiles import ITEM_FIELDS, TileClass, classes_of, tile_classes, workspace_elements
from fastgen.kernels.gpu.work_list import ITEM_COST, LEAST_SHARE, WorkItem, list_attention_work, work_items

Import = Callable[[str], ModuleType]
Sequences = Sequence[tuple[int, int]]  # rows and context of each sequence
CPU = torch.device("cpu")
H100 = 132  # multiprocessors

LONG_CHUNK = ((8192, 102400),)
STEPS: dict[str, Sequences] = {
    "one of 128k and 40 of 1k": ((1, 131071), *((1, 1023),) * 40),
    "four of 32k and 60 of 2k": (*((1, 32767),) * 4, *((1, 2047),) * 60),
    "64 of 1k": ((1, 1023),) * 64,
    "a chunk of 8k at 100k and 32 decodes": (*((1, 2047),) * 32, *LONG_CHUNK),
    "verification of 2 to 8": tuple((2 + number % 7, 700 + 131 * number) for number in range(64)),
    "verification of 2 to 8, few": ((2, 130000), (5, 3000), (8, 9000), (8, 1000)),
    "chunks and decodes": ((1, 500), (300, 40000), (1, 90000), (700, 0), (9, 12000)),
}


def starts_and_lengths(sequences: Sequences) -> tuple[list[int], list[int]]:
    return list(accumulate((rows for rows, _ in sequences), initial=0)), [sum(sequence) for sequence in sequences]


def items_of(
    sequences: Sequences, *, window: int = 0, group: int = 4, kv_heads: int = 8, multiprocessors: int = H100
) -> list[tuple[TileClass, list[list[WorkItem]]]]:
    """Return the launches of a step in bfloat16 with heads of 128 on an H100, and the items of each program."""
    starts, lengths = starts_and_lengths(sequences)
    classes = tile_classes(starts[-1], len(sequences), group, kv_heads, 128, 2, 90, multiprocessors)
    return [(tiles, work_items(starts, lengths, tiles, window)) for tiles in classes]


def cost(items: Sequence[WorkItem]) -> int:
    return sum(item.end_tile - item.first_tile + ITEM_COST for item in items)


@pytest.mark.parametrize("step", STEPS)
def test_the_heaviest_program_has_at_most_a_tenth_more_than_the_mean(step: str) -> None:
    for tiles, programs in items_of(STEPS[step]):
        costs = [cost(items) for items in programs]
        assert max(costs) <= 1.1 * sum(costs) / tiles.num_programs, tiles


some_rows = st.one_of(st.just(1), st.integers(0, 8), st.integers(0, 600))
some_context = st.one_of(st.integers(0, 100), st.integers(0, 3000), st.integers(0, 131072))
some_sequences = st.lists(st.tuples(some_rows, some_context), min_size=1, max_size=80)
some_windows = st.sampled_from((0, 0, 1, 60, 64, 1000, 4096))


@settings(max_examples=150)
@given(some_sequences, some_windows, st.sampled_from((1, 2, 4, 7, 16, 32)), st.sampled_from((1, 2, 8, 32)))
def test_no_program_has_more_than_its_share_and_one_tile_that_another_has_begun(
    sequences: Sequences, window: int, group: int, kv_heads: int
) -> None:
    for tiles, programs in items_of(sequences, window=window, group=group, kv_heads=kv_heads):
        costs = [cost(items) for items in programs]
        mean = sum(costs) / tiles.num_programs
        assert max(costs) <= max(mean + 1, LEAST_SHARE) + ITEM_COST


@settings(max_examples=150)
@given(some_sequences, some_windows, st.sampled_from((1, 3, 4, 16, 32)), st.sampled_from((1, 8)))
def test_every_key_of_every_row_is_computed_once(sequences: Sequences, window: int, group: int, kv_heads: int) -> None:
    starts, lengths = starts_and_lengths(sequences)
    tiles_of_row: dict[int, list[int]] = defaultdict(list)  # KV tiles that are computed
    block_n: dict[int, int] = {}
    for tiles, programs in items_of(sequences, window=window, group=group, kv_heads=kv_heads):
        parts: dict[int, list[tuple[int, WorkItem]]] = defaultdict(list)
        for program, items in enumerate(programs):
            for item in items:
                assert item.first_tile < item.end_tile
                assert 0 < item.num_tokens <= tiles.block_q
                assert item.position - item.row == lengths[item.sequence] - starts[item.sequence + 1]
                parts[item.row].append((program - item.split, item))
                for row in range(item.row, item.row + item.num_tokens):
                    assert starts[item.sequence] <= row < starts[item.sequence + 1]
                    tiles_of_row[row] += range(item.first_tile, item.end_tile)
                    block_n[row] = tiles.configuration.block_n
        assert sum(map(len, parts.values())) <= tiles.max_tiles + tiles.num_programs
        assert len(parts) <= tiles.max_tiles
        counted = [first_program for tile in parts.values() for first_program, item in tile if item.num_splits > 1]
        for tile in parts.values():
            assert [item.split for _, item in tile] == list(range(tile[0][1].num_splits))
            assert {(first_program, item.num_splits) for first_program, item in tile} == {(tile[0][0], len(tile))}
            if len(tile) > 1:
                assert counted.count(tile[0][0]) == len(tile), "two split tiles have one counter"
    for sequence, (rows, context) in enumerate(sequences):
        for row in range(rows):
            number = starts[sequence] + row
            found, position, size = tiles_of_row[number], context + row, block_n[number]
            assert len(set(found)) == len(found), "a KV tile is computed twice"
            first = max(position - window + 1, 0) // size if window else 0
            assert set(range(first, position // size + 1)) <= set(found)
    assert len(tiles_of_row) == starts[-1]


def test_a_range_of_keys_ends_with_the_last_token_of_its_tile_and_begins_in_the_window_of_its_first() -> None:
    ((_, programs),) = items_of(((1, 640), (6, 640)), window=100, multiprocessors=0)
    found = {(item.row, item.first_tile, item.end_tile) for items in programs for item in items}
    assert found == {(0, 8, 11), (1, 8, 11), (5, 8, 11)}


def unpack(work: torch.Tensor, classes: Sequence[TileClass], num_sequences: int) -> list[list[list[WorkItem]]]:
    """Return the items of each program of each launch, as the attention kernel reads them."""
    found = []
    sizes = [tiles.work_elements(num_sequences) for tiles in classes]
    for tiles, part in zip(classes, torch.split(work, sizes), strict=True):
        ranges, items = part[: 2 * tiles.num_programs].view(-1, 2).tolist(), part[2 * tiles.num_programs :]
        found.append(
            [
                [WorkItem(*items[i * ITEM_FIELDS : (i + 1) * ITEM_FIELDS].tolist()) for i in range(first, end)]
                for first, end in ranges
            ]
        )
    return found


def check_kernel(kernels: ModuleType, sequences: Sequences, window: int, group: int, padded: int = 0) -> None:
    """Compare the kernel's list with its twin's, and both with `work_items`."""
    starts, lengths = starts_and_lengths((*sequences, *((0, 0),) * padded))
    query = torch.empty(1, dtype=torch.bfloat16).expand(starts[-1] + padded, 2 * group, 64)
    cache = torch.empty(1, dtype=torch.bfloat16).expand(1, 2, 16, 64)
    operands = query, cache, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    classes = classes_of(query, cache, len(lengths))
    expected = [work_items(starts, lengths, tiles, window) for tiles in classes]
    for work in (kernels.list_attention_work(*operands, window), list_attention_work(*operands, window)):
        assert unpack(work, classes, len(lengths)) == expected


@pytest.mark.parametrize("multiprocessors", [0, 8, H100])
@pytest.mark.parametrize("step", STEPS)
def test_the_kernel_lists_the_items_of_its_twin(
    step: str, multiprocessors: int, interpreted: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda _: multiprocessors)
    check_kernel(interpreted("work_list"), STEPS[step], window=0, group=4)


@pytest.mark.parametrize("window", [1, 64, 1000])
def test_windows_shorten_the_ranges_that_the_kernel_lists(window: int, interpreted: Import) -> None:
    check_kernel(interpreted("work_list"), STEPS["chunks and decodes"], window=window, group=3)


@pytest.mark.parametrize(
    "sequences",
    [
        ((0, 0),),
        ((1, 0),),
        ((0, 0), (3, 5), (0, 0), (0, 7), (80, 100), (0, 0)),
        ((64, 0),),
        ((65, 0),),
        ((1, 31),) * 600,  # more sequences than the kernel counts at once
        ((2000, 100),),  # and tiles
    ],
    ids=["empty", "one row", "empty between others", "few rows", "a chunk", "many sequences", "many tiles"],
)
@pytest.mark.parametrize("group", [4, 32])
def test_the_kernel_lists_empty_and_many_sequences(sequences: Sequences, group: int, interpreted: Import) -> None:
    check_kernel(interpreted("work_list"), sequences, window=0, group=group, padded=3)


def test_the_kernel_lists_the_items_of_random_steps(interpreted: Import) -> None:
    rng = random.Random(0)
    for _ in range(25):
        sequences = [
            (rng.choice((1, rng.randint(0, 8), rng.randint(0, 600))), rng.randint(0, 10 ** rng.randint(1, 5)))
            for _ in range(rng.randint(1, 80))
        ]
        window = rng.choice((0, 0, 1, 60, 4096))
        check_kernel(interpreted("work_list"), sequences, window, group=rng.choice((1, 4, 7, 32)))


def test_steps_of_few_rows_have_one_launch_and_others_one_for_decodes_and_one_for_chunks() -> None:
    def block_ms(num_rows: int, group: int) -> list[int]:
        return [tiles.configuration.block_m for tiles in tile_classes(num_rows, 256, group, 8, 128, 2, 90, H100)]

    assert block_ms(1, 4) == block_ms(64, 16) == [16]
    assert block_ms(65, 4) == block_ms(8192, 16) == [16, 128]
    assert block_ms(1, 32) == block_ms(8192, 32) == [128], "a small tile has no room for the heads of one token"


def test_the_launches_of_a_step_are_found_once_for_all_layers() -> None:
    query, cache = torch.empty(70, 8, 64), torch.empty(9, 2, 16, 64)
    assert classes_of(query, cache, 5) is classes_of(query, cache, 5)


@pytest.mark.parametrize(("group", "most_rows"), [(1, 32), (4, 8), (8, 4), (16, 2)])
def test_sequences_that_fill_two_small_tiles_are_no_chunks(group: int, most_rows: int) -> None:
    small, large = tile_classes(100, 10, group, 8, 128, 2, 90, H100)
    assert (small.most_rows, large.least_rows) == (most_rows, most_rows + 1)


def test_there_are_no_more_programs_than_fit_on_the_device() -> None:
    for kv_heads, small_programs, large_programs in ((1, 264, 132), (8, 33, 16), (10, 26, 13), (200, 1, 1)):
        small, large = tile_classes(100, 10, 1, kv_heads, 128, 2, 90, H100)
        assert (small.num_programs, large.num_programs) == (small_programs, large_programs)


def test_a_workspace_holds_two_results_for_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda _: H100)
    assert workspace_elements(8, 128, CPU) == 264 + 2 * 8 * 16 * 128 * (128 + 2)
    assert 4 * workspace_elements(8, 128, CPU) < 18e6
    assert 4 * workspace_elements(1, 256, CPU) < 19e6
