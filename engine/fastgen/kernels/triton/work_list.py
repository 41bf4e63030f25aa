"""The Triton kernel that writes the work list of paged attention; `fastgen.kernels.gpu.work_list` has its rules.

One program writes the items of one launch. It counts the tiles of the sequences, and then of each tile its KV tiles and
so its place in the row of all tiles. A tile that begins at `place` belongs to program `place // share`. A program whose
share begins within a tile continues that tile: a *continuation*. Sort beginnings of tiles and of shares by place, a
share's first where both are at one place: then tile t is item t + (its program), and the continuation of program p is
item p - 1 + (tiles before its share). So every program can write its items by itself, and none is out of order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.attention_tiles import ITEM_FIELDS, classes_of
from fastgen.kernels.gpu.work_list import ITEM_COST, LEAST_SHARE
from fastgen.kernels.triton.variant import Variant

_CONSTANTS = {"COST": ITEM_COST, "LEAST_SHARE": LEAST_SHARE, "FIELDS": ITEM_FIELDS, "BLOCK": 512}
_WARPS = 8
_NUMBERS = (
    "num_sequences", "window", "most_small_rows", "large_part",
    "small_block_q", "small_block_n", "small_programs", "small_max_tiles",
    "large_block_q", "large_block_n", "large_programs", "large_max_tiles",
)  # fmt: skip


def list_attention_work(
    query: torch.Tensor, key_cache: torch.Tensor, query_starts: torch.Tensor, seq_lens: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """Launch the kernel: see `fastgen.kernels.gpu.work_list.list_attention_work`."""
    num_sequences = len(seq_lens)
    classes = classes_of(query, key_cache, num_sequences)
    sizes = [tiles.work_elements(num_sequences) for tiles in classes]
    work = query_starts.new_empty(sum(sizes))
    numbers = [
        (tiles.block_q, tiles.configuration.block_n, tiles.num_programs, tiles.max_tiles)
        for tiles in (classes[0], classes[-1])
    ]
    _list_work[(len(classes),)](
        query_starts, seq_lens, work, num_sequences, window, classes[0].most_rows, sizes[0], *numbers[0], *numbers[1],
        **_CONSTANTS, num_warps=_WARPS,
    )  # fmt: skip
    return work


@triton.jit
def _last_at_most(values, count, limit):
    """Return, for each limit, the index of the last of `count` ascending values that is at most the limit, or -1."""
    index = limit * 0 - 1
    step = 1
    while step <= count:
        step *= 2
    while step > 1:
        step //= 2
        value = tl.load(values + index + step, mask=index + step < count, other=2147483647)
        index = tl.where(value <= limit, index + step, index)
    return index


@triton.jit
def _tiles_at(tile, query_starts, seq_lens, tile_starts, num_sequences, block_q, block_n, window):
    """Return the sequence, first row, tokens, position and range of KV tiles of each tile, as in `WorkItem`."""
    sequence = _last_at_most(tile_starts, num_sequences, tile)
    first = (tile - tl.load(tile_starts + sequence, mask=sequence >= 0, other=0)) * block_q
    start = tl.load(query_starts + sequence, mask=sequence >= 0, other=0)
    rows = tl.load(query_starts + sequence + 1, mask=sequence >= 0, other=0) - start
    position = tl.load(seq_lens + sequence, mask=sequence >= 0, other=0) - rows + first
    num_tokens = tl.minimum(rows - first, block_q)
    first_key = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return sequence, start + first, num_tokens, position, first_key // block_n, tl.cdiv(position + num_tokens, block_n)


@triton.jit
def _store_item(item, mask, sequence, row, num_tokens, position, first_tile, end_tile, split, num_splits):
    """Write the elements of items, in the order of `WorkItem`."""
    tl.store(item, sequence, mask=mask)
    tl.store(item + 1, row, mask=mask)
    tl.store(item + 2, num_tokens, mask=mask)
    tl.store(item + 3, position, mask=mask)
    tl.store(item + 4, first_tile, mask=mask)
    tl.store(item + 5, end_tile, mask=mask)
    tl.store(item + 6, split, mask=mask)
    tl.store(item + 7, num_splits, mask=mask)


@triton.jit(do_not_specialize=list(_NUMBERS), do_not_specialize_on_alignment=["query_starts", "seq_lens", "work"])
def _list_work(
    query_starts, seq_lens, work, num_sequences, window, most_small_rows, large_part,
    small_block_q, small_block_n, small_programs, small_max_tiles,
    large_block_q, large_block_n, large_programs, large_max_tiles,
    COST: tl.constexpr, LEAST_SHARE: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the items of one launch: program 0 those of small tiles, program 1 those of large ones.

    `large_part` is where the second part of the list begins.
    """
    is_small = tl.program_id(0) == 0
    block_q = tl.where(is_small, small_block_q, large_block_q)
    block_n = tl.where(is_small, small_block_n, large_block_n)
    num_programs = tl.where(is_small, small_programs, large_programs)
    max_tiles = tl.where(is_small, small_max_tiles, large_max_tiles)
    ranges = work + tl.where(is_small, 0, large_part)
    items = ranges + 2 * num_programs
    tile_starts = items + FIELDS * (max_tiles + num_programs)  # first tile of each sequence
    places = tile_starts + num_sequences  # of each tile

    num_tiles = 0
    for first in range(0, num_sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        exists = sequence < num_sequences
        rows = tl.load(query_starts + sequence + 1, mask=exists, other=0)
        rows -= tl.load(query_starts + sequence, mask=exists, other=0)
        count = tl.where((rows <= most_small_rows) == is_small, tl.cdiv(rows, block_q), 0)
        tl.store(tile_starts + sequence, num_tiles + tl.cumsum(count, 0) - count, mask=exists)
        num_tiles += tl.sum(count, 0)
    tl.debug_barrier()

    total = 0
    for first in range(0, num_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        _, _, _, _, first_tile, end_tile = _tiles_at(
            tile, query_starts, seq_lens, tile_starts, num_sequences, block_q, block_n, window
        )
        cost = tl.where(tile < num_tiles, end_tile - first_tile + COST, 0)
        tl.store(places + tile, total + tl.cumsum(cost, 0) - cost, mask=tile < num_tiles)
        total += tl.sum(cost, 0)
    tl.debug_barrier()

    share = tl.maximum(tl.cdiv(total, num_programs), LEAST_SHARE)
    for first in range(0, num_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        exists = tile < num_tiles
        sequence, row, num_tokens, position, first_tile, end_tile = _tiles_at(
            tile, query_starts, seq_lens, tile_starts, num_sequences, block_q, block_n, window
        )
        place = tl.load(places + tile, mask=exists, other=0)
        program = place // share
        num_splits = (place + end_tile - first_tile - 1) // share - program + 1
        end = tl.minimum((program + 1) * share - place + first_tile, end_tile)
        _store_item(
            items + (tile + program) * FIELDS, exists, sequence, row, num_tokens, position, first_tile, end, 0,
            num_splits,
        )  # fmt: skip
    for first in range(0, num_programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        begin = program * share
        tile = _last_at_most(places, num_tiles, begin - 1)
        sequence, row, num_tokens, position, first_tile, end_tile = _tiles_at(
            tile, query_starts, seq_lens, tile_starts, num_sequences, block_q, block_n, window
        )
        place = tl.load(places + tile, mask=tile >= 0, other=0)
        continues = (tile >= 0) & (begin < place + end_tile - first_tile) & (program < num_programs)
        first_program = place // share
        num_splits = (place + end_tile - first_tile - 1) // share - first_program + 1
        begin = first_tile + begin - place
        _store_item(
            items + (program + tile) * FIELDS, continues, sequence, row, num_tokens, position, begin,
            tl.minimum(begin + share, end_tile), program - first_program, num_splits,
        )  # fmt: skip
        following = _last_at_most(places, num_tiles, program * share + share - 1)
        tl.store(ranges + 2 * program, program + tile + 1 - continues.to(tl.int32), mask=program < num_programs)
        tl.store(ranges + 2 * program + 1, program + following + 1, mask=program < num_programs)


def _variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("query_starts", "seq_lens", "work"), "*i32") | dict.fromkeys(_NUMBERS, "i32")
    yield Variant("int32", _list_work, signature, _CONSTANTS, _WARPS)


VARIANTS = tuple(_variants())
