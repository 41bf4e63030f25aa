"""Launches of the paged-attention kernel: the sizes of its tiles by device, and the compiled variants."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.attention import SPLIT_PROGRAMS, check_shapes, workspace_elements
from fastgen.kernels.triton.attention_kernel import LOG2_E, paged_attention_kernel
from fastgen.kernels.triton.variant import Variant


@dataclass(frozen=True, slots=True)
class Configuration:
    """Sizes of a launch: pairs of a tile, keys of a KV tile, warps of a program, stages of the loads' pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element of the cache and by the head size rounded up to a power of two.
_DECODES = {
    (1, 64): Configuration(16, 64, 4, 2),
    (1, 128): Configuration(16, 64, 4, 3),
    (1, 256): Configuration(16, 32, 4, 3),
    (2, 64): Configuration(16, 64, 4, 3),
    (2, 128): Configuration(16, 64, 4, 3),
    (2, 256): Configuration(16, 32, 4, 3),
    (4, 64): Configuration(16, 32, 4, 2),
    (4, 128): Configuration(16, 16, 8, 2),
    (4, 256): Configuration(16, 16, 4, 2),
}
_CHUNKS = {
    (1, 64): Configuration(128, 64, 8, 3),
    (1, 128): Configuration(128, 32, 8, 3),
    (1, 256): Configuration(64, 32, 8, 2),
    (2, 64): Configuration(128, 64, 8, 3),
    (2, 128): Configuration(128, 64, 8, 3),
    (2, 256): Configuration(64, 32, 8, 2),
    (4, 64): Configuration(32, 16, 8, 2),
    (4, 128): Configuration(16, 32, 8, 2),
    (4, 256): Configuration(32, 16, 8, 2),
}
# Where these would spill registers: by major compute capability, too.
_DECODES_BY_MAJOR = {
    (8, 1, 256): Configuration(16, 32, 4, 2),
    (8, 2, 256): Configuration(16, 32, 4, 2),
    (10, 1, 64): Configuration(16, 64, 4, 3),
    (12, 1, 128): Configuration(16, 32, 4, 2),
    (12, 1, 256): Configuration(16, 32, 4, 2),
    (12, 2, 128): Configuration(16, 32, 4, 3),
    (12, 2, 256): Configuration(16, 32, 4, 2),
}
_SPLIT_TILES = 2
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def choose(
    num_rows: int, num_sequences: int, group: int, head_dim: int, element_bytes: int, capability: int
) -> Configuration:
    """Choose the sizes of a launch over `num_rows` rows and `num_sequences` sequences, both capacities.

    Small tiles read keys and values again for every few tokens of a chunk, but a decode fills only `group` pairs of its
    tile: small ones are for steps that cannot hold more than decodes, or too few rows to occupy the device otherwise.

    Args:
        num_rows, num_sequences: capacities of the step.
        group: query heads of a KV head.
        head_dim: size of a head.
        element_bytes: bytes of an element of the KV cache.
        capability: compute capability of the device, as in 90.

    Raises:
        ValueError: no configuration has that head size or group.
    """
    key = (element_bytes, max(64, triton.next_power_of_2(head_dim)))
    if key not in _CHUNKS or group > _CHUNKS[key].block_m:
        raise ValueError(f"no attention kernel for heads of {head_dim} with {group} query heads to a KV head")
    major = capability // 10
    if group <= 16 and num_rows <= max(num_sequences, 64):
        return _DECODES_BY_MAJOR.get((major, *key), _DECODES[key])
    if major in (9, 10):
        return _CHUNKS[key]
    # Other devices multiply from registers; the pointers of a third stage would spill.
    return replace(_CHUNKS[key], num_stages=2)


@functools.cache
def _capability(device: torch.device) -> int:
    """Return the compute capability, as in 90; the interpreter's is 90."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _constants(
    chosen: Configuration, group: int, head_dim: int, block_size: int, dtype: tl.dtype, window: bool, softcap: bool
) -> dict[str, Any]:
    padded_dim, padded_group = max(64, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    # Of each thread, for the results of splits that are added. With 64, triton 3.6 spills the greatest sums in float32.
    merged_registers = 32 if dtype == tl.float32 and padded_group * padded_dim >= 4096 else 64
    return {
        "GROUP": group,
        "PADDED_GROUP": padded_group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "DTYPE": dtype,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "DIAGONAL": chosen.block_m > 16 and not window,
        "SPLIT_TILES": _SPLIT_TILES,
        "NUM_COUNTERS": SPLIT_PROGRAMS,
        "MERGED": max(merged_registers * 32 * chosen.num_warps // (padded_group * padded_dim), 1),
    }


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Launch the kernel: see `fastgen.kernels.gpu.attention.paged_attention`."""
    check_shapes(out, query, key_cache, value_cache)
    num_rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    capacity, table_length = block_tables.shape
    if not num_rows or not capacity:
        return
    group = heads // kv_heads
    capability = _capability(query.device)
    chosen = choose(num_rows, capacity, group, head_dim, key_cache.element_size(), capability)
    if key_cache.dtype == torch.float8_e4m3fn and capability < 89:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    # The interpreter would multiply bfloat16 as integers.
    interpreted = query.device.type == "cpu" and query.dtype == torch.bfloat16
    dtype = tl.float32 if interpreted else _DTYPES[query.dtype]
    num_extra = SPLIT_PROGRAMS // kv_heads
    if num_extra == 0 or table_length * block_size <= _SPLIT_TILES * chosen.block_n:
        workspace = None
    if workspace is None:
        num_extra = 0
    elif workspace.numel() < workspace_elements(heads, kv_heads, head_dim):
        raise ValueError(f"a workspace of {workspace.numel()} elements is too small: see workspace_elements()")
    num_tiles = num_rows // (chosen.block_m // group) + min(num_rows, capacity)
    paged_attention_kernel[kv_heads, num_extra + num_tiles](
        out, query, key_cache, value_cache, query_starts, seq_lens, block_tables, sinks, workspace,
        scale * key_scale * LOG2_E, value_scale, softcap, window, min(num_rows, capacity), capacity, num_extra,
        *out.stride()[:2], *query.stride()[:2],
        *key_cache.stride()[:2], *value_cache.stride()[:2], block_tables.stride(0),
        **_constants(chosen, group, head_dim, block_size, dtype, window > 0, softcap > 0),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def _variants() -> Iterator[Variant]:
    """Yield each configuration with each head size in bfloat16, and with representative ones in the other types.

    `global` is attention to all keys without sinks or a soft cap, `all` is with a window and both. Names end with the
    sizes of the tile and the number of stages.
    """
    every, some = (64, 80, 96, 112, 128, 160, 192, 256), (64, 128, 256)
    types = (
        ("bf16", "bf16", every, (80, 90, 100, 120)),
        ("fp16", "fp16", (128,), (80, 90, 100, 120)),
        ("fp32", "fp32", some, (80, 90, 100, 120)),
        ("bf16", "fp8e4nv", some, (90, 100, 120)),
        ("bf16", "u8", some, (80,)),
    )
    shapes = {"chunks": (1024, 4), "decodes": (16, 4), "decodes-group16": (16, 16)}  # rows of 16 sequences, group
    for activation, cache, head_dims, targets in types:
        element_bytes = {"bf16": 2, "fp16": 2, "fp32": 4}.get(cache, 1)
        for head_dim, (kind, (num_rows, group)) in itertools.product(head_dims, shapes.items()):
            targets_of: dict[Configuration, tuple[int, ...]] = {}
            for target in targets:
                chosen = choose(num_rows, 16, group, head_dim, element_bytes, target)
                targets_of[chosen] = (*targets_of.get(chosen, ()), target)
            for (chosen, its_targets), limited in itertools.product(targets_of.items(), (False, True)):
                sizes = f"{chosen.block_m}x{chosen.block_n}x{chosen.num_stages}"
                name = f"{kind}-{activation}-{cache}-{head_dim}-{'all' if limited else 'global'}-{sizes}"
                signature = _signature(activation, cache) | ({"sinks": "*fp32"} if limited else {})
                dtype = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[activation]
                constants = _constants(chosen, group, head_dim, 16, dtype, limited, limited)
                yield Variant(
                    name, paged_attention_kernel, signature, constants | ({} if limited else {"sinks": None}),
                    chosen.num_warps, chosen.num_stages, its_targets,
                )  # fmt: skip


def _signature(activation: str, cache: str) -> dict[str, str]:
    strides = [name for name in paged_attention_kernel.arg_names if name.endswith("_stride")]
    return {
        **dict.fromkeys(("out", "query"), f"*{activation}:16"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16"),
        **dict.fromkeys(("query_starts", "seq_lens", "block_tables"), "*i32"),
        "workspace": "*fp32:16",
        **dict.fromkeys(("scale", "value_scale", "softcap"), "fp32"),
        **dict.fromkeys(strides, "i32:16"),
        **dict.fromkeys(("window", "num_sequences", "capacity", "num_extra", "table_stride"), "i32"),
    }


VARIANTS = tuple(_variants())
