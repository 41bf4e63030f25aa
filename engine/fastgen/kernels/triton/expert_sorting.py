"""Sort pairs by expert, for products whose rows have one expert.

A pair is a token with one of its experts; token t has the pairs t * top k to t * top k + top k - 1. Pairs are sorted by
expert into tiles of rows, each of one expert. Pairs with a negative expert are left out. Tiles are as many as may be
needed, which the host knows without the routing; those beyond the needed ones have 0 rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.experts import MAX_EXPERTS
from fastgen.kernels.triton.variant import Variant

TILES = (16, 32, 64, 128)  # rows of a tile that products may choose
PADDED_EXPERTS = tuple(16 << shift for shift in range((MAX_EXPERTS // 16).bit_length()))

_MAX_CHUNKS = 128
_WARPS = 8


def padded_experts(num_experts: int) -> int:
    """Return the number of experts that a program compares with, one of PADDED_EXPERTS."""
    padded: int = triton.next_power_of_2(num_experts)
    return max(16, padded)


def max_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """Return the largest number of tiles that `pairs` pairs can fill, whatever their experts are.

    n pairs of an expert fill 1 + (n - 1) // tile tiles, so they fill the most if as many experts as possible have one.
    """
    busy = min(pairs, num_experts)
    return busy + (pairs - busy) // tile


def sort_pairs(
    expert_ids: torch.Tensor, num_experts: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs by expert, stably, in two launches.

    Returns:
        sorted pairs [tiles * tile], unspecified beyond each tile's rows; expert of each tile; rows of each tile.
    """
    pairs, tiles = expert_ids.numel(), max_tiles(expert_ids.numel(), num_experts, tile)
    constants = _constants(num_experts)
    rows = constants["ROWS"]
    chunk = rows * triton.cdiv(pairs, rows * _MAX_CHUNKS)  # pairs of a program
    chunks = triton.cdiv(pairs, chunk)
    counts = expert_ids.new_empty(chunks, num_experts)
    _count_pairs[(chunks,)](expert_ids, counts, pairs, chunk, num_experts, **constants, num_warps=_WARPS)
    sorted_pairs, tile_experts = expert_ids.new_empty(tiles * tile), expert_ids.new_empty(tiles)
    tile_rows = torch.empty_like(tile_experts)
    _sort_pairs[(chunks,)](
        expert_ids, counts, sorted_pairs, tile_experts, tile_rows, pairs, chunk, chunks, tiles, num_experts,
        **constants, TILE=tile, num_warps=_WARPS,
    )  # fmt: skip
    return sorted_pairs, tile_experts, tile_rows


def _constants(num_experts: int) -> dict[str, int]:
    """Return the padded number of experts, and the pairs that are compared with them at once."""
    padded = padded_experts(num_experts)
    return {"EXPERTS": padded, "ROWS": 4096 // padded}


@triton.jit(do_not_specialize=["pairs", "chunk", "num_experts"])
def _count_pairs(expert_ids, counts, pairs, chunk, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Count the pairs of each expert in one chunk."""
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), tl.int32)
    for start in range(program * chunk, program * chunk + chunk, ROWS):
        pair = start + tl.arange(0, ROWS)
        expert = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
        count += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts + program * num_experts + experts, count, mask=experts < num_experts)


@triton.jit(do_not_specialize=["pairs", "chunk", "chunks", "num_tiles", "num_experts"])
def _sort_pairs(
    expert_ids, counts, sorted_pairs, tile_experts, tile_rows, pairs, chunk, chunks, num_tiles, num_experts,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one chunk to their tiles, and describe this program's part of the tiles."""
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # pairs in earlier chunks
    for other in range(chunks):
        count = tl.load(counts + other * num_experts + experts, mask=experts < num_experts, other=0)
        total += count
        before += tl.where(other < program, count, 0)
    tiles = (total + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    first = ends - tiles
    position = first * TILE + before  # of each expert's next pair
    for start in range(program * chunk, program * chunk + chunk, ROWS):
        pair = start + tl.arange(0, ROWS)
        expert = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
        is_own = expert[:, None] == experts[None, :]
        ranks = tl.cumsum(is_own.to(tl.int32), 0) - 1
        positions = tl.sum(tl.where(is_own, position[None, :] + ranks, 0), 1)
        tl.store(sorted_pairs + positions, pair, mask=expert >= 0)
        position += tl.sum(is_own.to(tl.int32), 0)
    for start in range(program * ROWS, num_tiles, chunks * ROWS):
        tile = start + tl.arange(0, ROWS)
        expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        rest = total[None, :] - (tile[:, None] - first[None, :]) * TILE
        rows = tl.sum(tl.where(expert[:, None] == experts[None, :], rest, 0), 1)
        tl.store(tile_experts + tile, expert, mask=tile < num_tiles)
        tl.store(tile_rows + tile, tl.minimum(rows, TILE), mask=tile < num_tiles)


def _variants() -> Iterator[Variant]:
    ids = dict.fromkeys(("expert_ids", "counts"), "*i32:16") | dict.fromkeys(("pairs", "chunk", "num_experts"), "i32")
    tiles = dict.fromkeys(("sorted_pairs", "tile_experts", "tile_rows"), "*i32:16")
    for number in PADDED_EXPERTS:
        name, constants = f"{number}_experts", _constants(number)
        yield Variant(name, _count_pairs, ids, constants, _WARPS)
        signature = ids | tiles | dict.fromkeys(("chunks", "num_tiles"), "i32")
        for tile in TILES:
            yield Variant(f"{name}_tile_{tile}", _sort_pairs, signature, constants | {"TILE": tile}, _WARPS)


VARIANTS = tuple(_variants())
