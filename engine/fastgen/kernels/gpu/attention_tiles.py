"""Tiles of paged attention on a GPU: their sizes by device, and the launches of a step."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

# Elements of a work item; see `fastgen.kernels.gpu.work_list.WorkItem`.
ITEM_FIELDS = 8
# Persistent programs of a launch for each multiprocessor: about as many as are resident at once.
_SMALL_TILE_PROGRAMS = 2
_LARGE_TILE_PROGRAMS = 1
# Multiprocessors that the interpreter has: few, because it runs programs one after another.
_INTERPRETED_MULTIPROCESSORS = 8
# Steps of at most so many rows are not worth a launch for chunks of their own.
_FEW_ROWS = 64
# A sequence with more small tiles than these is a chunk.
_MOST_SMALL_TILES = 2


@dataclass(frozen=True, slots=True)
class Configuration:
    """Sizes of a launch: pairs of a tile, keys of a KV tile, warps of a program, stages of the loads' pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element of the cache and by the head size rounded up to a power of two. The load of the block table
# takes stages of a small tile's pipeline, too: with 3, its keys and values have one buffer, with 5 they have two.
_SMALL = {
    (1, 64): Configuration(16, 64, 4, 2),
    (1, 128): Configuration(16, 64, 4, 5),
    (1, 256): Configuration(16, 32, 4, 3),
    (2, 64): Configuration(16, 64, 4, 5),
    (2, 128): Configuration(16, 64, 4, 5),
    (2, 256): Configuration(16, 32, 4, 5),
    (4, 64): Configuration(16, 32, 4, 2),
    (4, 128): Configuration(16, 16, 8, 2),
    (4, 256): Configuration(16, 16, 8, 2),
}
_LARGE = {
    (1, 64): Configuration(128, 64, 8, 3),
    (1, 128): Configuration(128, 32, 8, 3),
    (1, 256): Configuration(64, 32, 8, 2),
    (2, 64): Configuration(128, 64, 8, 3),
    (2, 128): Configuration(128, 64, 8, 3),
    (2, 256): Configuration(64, 32, 8, 2),
    (4, 64): Configuration(32, 16, 8, 2),
    (4, 128): Configuration(16, 32, 8, 2),
    (4, 256): Configuration(16, 16, 8, 2),
}
# Where these would spill registers: by major compute capability, too.
_SMALL_BY_MAJOR = {
    (8, 1, 256): Configuration(16, 32, 4, 2),
    (8, 2, 256): Configuration(16, 32, 4, 2),
    (10, 1, 64): Configuration(16, 64, 4, 3),
    (12, 1, 128): Configuration(16, 32, 4, 2),
    (12, 1, 256): Configuration(16, 32, 4, 2),
    (12, 2, 128): Configuration(16, 32, 4, 3),
    (12, 2, 256): Configuration(16, 32, 4, 2),
}


@dataclass(frozen=True, slots=True)
class TileClass:
    """One launch of a step: the sequences whose rows it computes, in tiles of one size.

    Attributes:
        configuration: sizes of the launch.
        block_q: tokens of a tile.
        least_rows, most_rows: its sequences have so many rows.
        num_programs: persistent programs for each KV head.
        max_tiles: most tiles that its sequences can have, whatever their rows are.
    """

    configuration: Configuration
    block_q: int
    least_rows: int
    most_rows: int
    num_programs: int
    max_tiles: int

    def work_elements(self, num_sequences: int) -> int:
        """Return the elements of its part of a work list.

        These are the range of items of each program [programs, 2], the items [tiles + programs, ITEM_FIELDS], and
        scratch of the kernel that writes them: an element for each sequence and each tile.
        """
        most_items = self.max_tiles + self.num_programs
        return 2 * self.num_programs + ITEM_FIELDS * most_items + num_sequences + self.max_tiles


@functools.lru_cache(maxsize=64)  # for the layers of a step, which is of any size without graphs
def tile_classes(
    num_rows: int,
    num_sequences: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    capability: int,
    multiprocessors: int,
) -> tuple[TileClass, ...]:
    """Return the launches of a step: one, or one for decodes and one for chunks.

    A small tile reads keys and values again for every few tokens of a chunk, but a decode fills only `group` pairs of
    its tile. So decodes, and sequences of few rows to verify, have small tiles and chunks large ones. Nothing here
    depends on lengths: a CUDA graph has the same launches for every step.

    Args:
        num_rows, num_sequences: capacities of the step.
        group: query heads of a KV head.
        kv_heads: heads of the cache.
        head_dim: size of a head.
        element_bytes: bytes of an element of the KV cache.
        capability: compute capability of the device, as in 90.
        multiprocessors: of the device.

    Raises:
        ValueError: there are no tiles for this head size or group.
    """
    small, large = _configurations(element_bytes, head_dim, capability)
    if group > large.block_m:
        raise ValueError(f"no attention kernel for heads of {head_dim} with {group} query heads to a KV head")

    def tile_class(chosen: Configuration, per_multiprocessor: int, least_rows: int, most_rows: int) -> TileClass:
        block_q = chosen.block_m // group
        num_programs = _num_programs(per_multiprocessor, multiprocessors, kv_heads)
        # Each sequence may end with a tile that is not full.
        max_tiles = min(num_rows, num_rows // block_q + min(num_rows // least_rows, num_sequences))
        return TileClass(chosen, block_q, least_rows, most_rows, num_programs, max_tiles)

    if group > small.block_m:
        return (tile_class(large, _LARGE_TILE_PROGRAMS, 1, num_rows),)
    if num_rows <= _FEW_ROWS:
        return (tile_class(small, _SMALL_TILE_PROGRAMS, 1, num_rows),)
    most_rows = _MOST_SMALL_TILES * (small.block_m // group)
    return (
        tile_class(small, _SMALL_TILE_PROGRAMS, 1, most_rows),
        tile_class(large, _LARGE_TILE_PROGRAMS, most_rows + 1, num_rows),
    )


def classes_of(query: torch.Tensor, key_cache: torch.Tensor, num_sequences: int) -> tuple[TileClass, ...]:
    """Return the launches of a step over a query [T, heads, head_dim] and a cache [blocks, kv_heads, ...]."""
    num_rows, heads, head_dim = query.shape
    kv_heads, device = key_cache.shape[1], query.device
    return tile_classes(
        num_rows, num_sequences, heads // kv_heads, kv_heads, head_dim, key_cache.element_size(), capability(device),
        num_multiprocessors(device),
    )  # fmt: skip


def num_counters(kv_heads: int, device: torch.device) -> int:
    """Return the counters of a workspace: one for each program of the largest grid, rounded up to 16 bytes."""
    programs = kv_heads * _num_programs(_SMALL_TILE_PROGRAMS, num_multiprocessors(device), kv_heads)
    return -(-programs // 4) * 4


def workspace_elements(kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Return the number of float32 elements of a workspace for launches of any size with these heads.

    It holds counters of split tiles, and two partial results for each program: head_dim sums, a maximum and a norm for
    each pair of a tile. For 8 KV heads of 128 on an H100 it takes 17.0 MB. All layers share it.
    """
    processors = num_multiprocessors(device)
    pairs = 0
    for element_bytes in (1, 2, 4):
        small, large = _configurations(element_bytes, head_dim, capability(device))
        for chosen, per_multiprocessor in ((small, _SMALL_TILE_PROGRAMS), (large, _LARGE_TILE_PROGRAMS)):
            pairs = max(pairs, chosen.block_m * _num_programs(per_multiprocessor, processors, kv_heads))
    return num_counters(kv_heads, device) + 2 * kv_heads * pairs * (head_dim + 2)


def padded_dim(head_dim: int) -> int:
    """Return the head size that tiles have: a power of two, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())


@functools.cache
def capability(device: torch.device) -> int:
    """Return the compute capability, as in 90; the interpreter's is 90."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of the device."""
    if device.type == "cpu":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _configurations(element_bytes: int, head_dim: int, capability: int) -> tuple[Configuration, Configuration]:
    """Return the sizes of small and of large tiles."""
    key, major = (element_bytes, padded_dim(head_dim)), capability // 10
    if key not in _LARGE:
        raise ValueError(f"no attention kernel for heads of {head_dim}")
    small, large = _SMALL_BY_MAJOR.get((major, *key), _SMALL[key]), _LARGE[key]
    # Devices other than these multiply from registers; the pointers of a third stage would spill.
    return small, large if major in (9, 10) else replace(large, num_stages=2)


def _num_programs(per_multiprocessor: int, multiprocessors: int, kv_heads: int) -> int:
    return max(per_multiprocessor * multiprocessors // kv_heads, 1)
