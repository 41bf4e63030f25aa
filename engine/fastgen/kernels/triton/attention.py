"""Launches of the paged-attention kernel, and the compiled variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.attention import check_shapes
from fastgen.kernels.gpu.attention_tiles import (
    ITEM_FIELDS,
    Configuration,
    capability,
    classes_of,
    num_counters,
    padded_dim,
    tile_classes,
    workspace_elements,
)
from fastgen.kernels.triton.attention_kernel import LOG2_E, paged_attention_kernel
from fastgen.kernels.triton.variant import Variant

# Of a thread, for tiles of few pairs: all that it can have. Without a limit, the compiler spills some so that more
# programs fit on a multiprocessor, but the grid has no more. Other tiles do not spill if there is no limit.
_MOST_REGISTERS = 255
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _constants(
    chosen: Configuration, group: int, head_dim: int, block_size: int, dtype: tl.dtype, window: bool, softcap: bool
) -> dict[str, Any]:
    dim, block_m = padded_dim(head_dim), chosen.block_m
    # Pairs whose parts are added at once, and registers of each thread for them: of a small tile those of a token, as a
    # decode has no others. With more, triton 3.6 spills the greatest sums in float32, and large tiles spill theirs.
    added_pairs = group if block_m == 16 else 32
    padded_pairs = triton.next_power_of_2(added_pairs)
    registers = 32 if block_m > 16 or (dtype == tl.float32 and padded_pairs * dim >= 4096) else 64
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_N": chosen.block_n,
        "DTYPE": dtype,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "DIAGONAL": block_m > 16 and not window,
        "FIELDS": ITEM_FIELDS,
        "ADDED_PAIRS": added_pairs,
        "PADDED_PAIRS": padded_pairs,
        "ADDED_PARTS": max(registers * 32 * chosen.num_warps // (padded_pairs * dim), 1),
    }


def _max_registers(chosen: Configuration) -> int | None:
    return _MOST_REGISTERS if chosen.block_m <= 32 else None


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: torch.Tensor,  # noqa: ARG001
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Launch the kernel once for each of `classes_of(...)`: see `fastgen.kernels.gpu.attention.paged_attention`."""
    check_shapes(out, query, key_cache, value_cache)
    num_rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    num_sequences = len(seq_lens)
    if not num_rows or not num_sequences:
        return
    group, device = heads // kv_heads, query.device
    classes = classes_of(query, key_cache, num_sequences)
    sizes = [tiles.work_elements(num_sequences) for tiles in classes]
    if work.numel() != sum(sizes):
        raise ValueError(f"a work list of {work.numel()} elements is not that of this step: see list_attention_work()")
    if workspace.numel() < workspace_elements(kv_heads, head_dim, device):
        raise ValueError(f"a workspace of {workspace.numel()} elements is too small: see workspace_elements()")
    if key_cache.dtype == torch.float8_e4m3fn and capability(device) < 89:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    # The interpreter would multiply bfloat16 as integers.
    interpreted = device.type == "cpu" and query.dtype == torch.bfloat16
    dtype = tl.float32 if interpreted else _DTYPES[query.dtype]
    count = num_counters(kv_heads, device)
    counters, partials = workspace[:count].view(torch.int32), workspace[count:]
    for tiles, part in zip(classes, torch.split(work, sizes), strict=True):
        chosen = tiles.configuration
        paged_attention_kernel[kv_heads, tiles.num_programs](
            out, query, key_cache, value_cache, part, block_tables, sinks, counters, partials,
            scale * key_scale * LOG2_E, value_scale, softcap, window,
            *out.stride()[:2], *query.stride()[:2],
            *key_cache.stride()[:2], *value_cache.stride()[:2], block_tables.stride(0),
            **_constants(chosen, group, head_dim, block_size, dtype, window > 0, softcap > 0),
            num_warps=chosen.num_warps, num_stages=chosen.num_stages, maxnreg=_max_registers(chosen),
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
    shapes = {"chunks": (-1, 4), "decodes": (0, 4), "decodes-group16": (0, 16)}  # index of the launch, group
    for activation, cache, head_dims, targets in types:
        element_bytes = {"bf16": 2, "fp16": 2, "fp32": 4}.get(cache, 1)
        for head_dim, (kind, (launch, group)) in itertools.product(head_dims, shapes.items()):
            targets_of: dict[Configuration, tuple[int, ...]] = {}
            for target in targets:
                chosen = tile_classes(1024, 16, group, 1, head_dim, element_bytes, target, 1)[launch].configuration
                targets_of[chosen] = (*targets_of.get(chosen, ()), target)
            for (chosen, its_targets), limited in itertools.product(targets_of.items(), (False, True)):
                sizes = f"{chosen.block_m}x{chosen.block_n}x{chosen.num_stages}"
                name = f"{kind}-{activation}-{cache}-{head_dim}-{'all' if limited else 'global'}-{sizes}"
                signature = _signature(activation, cache) | ({"sinks": "*fp32"} if limited else {})
                dtype = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[activation]
                constants = _constants(chosen, group, head_dim, 16, dtype, limited, limited)
                yield Variant(
                    name, paged_attention_kernel, signature, constants | ({} if limited else {"sinks": None}),
                    chosen.num_warps, chosen.num_stages, _max_registers(chosen), its_targets,
                )  # fmt: skip


def _signature(activation: str, cache: str) -> dict[str, str]:
    strides = [name for name in paged_attention_kernel.arg_names if name.endswith("_stride")]
    return {
        **dict.fromkeys(("out", "query"), f"*{activation}:16"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{cache}:16"),
        **dict.fromkeys(("work", "block_tables"), "*i32"),
        "counters": "*i32:16",
        "partials": "*fp32:16",
        **dict.fromkeys(("scale", "value_scale", "softcap"), "fp32"),
        **dict.fromkeys(strides, "i32:16"),
        **dict.fromkeys(("window", "table_stride"), "i32"),
    }


VARIANTS = tuple(_variants())
