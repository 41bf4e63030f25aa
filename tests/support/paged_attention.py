"""Calls of the attention kernels on a paged cache, as a step makes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels.cpu.attention.decode import NO_SINK, attend_decodes
from fastgen.kernels.cpu.attention.prefill import attend_chunks
from fastgen.kernels.cpu.attention.work_items import DecodeItems, cut_chunks
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from fastgen.model.layers.linear import as_array


class Paged:
    """Random keys and values in a cache, and block tables in random order over it."""

    def __init__(self, head_dim: int, kv_heads: int, block_size: int, contexts: list[int]) -> None:
        torch.manual_seed(len(contexts) + head_dim)
        sizes = [-(-context // block_size) for context in contexts]
        blocks = torch.randperm(sum(sizes) + 2)[: sum(sizes)]
        self.starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        self.tables = [blocks[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]
        shape = (sum(sizes) + 2, kv_heads, block_size, head_dim)
        self.keys, self.values = torch.randn(shape), torch.randn(shape)

    def round(self) -> None:
        """Keep keys and values in bfloat16."""
        self.keys, self.values = self.keys.bfloat16(), self.values.bfloat16()


def decode(
    paged: Paged,
    queries: torch.Tensor,
    contexts: list[int],
    *,
    num_threads: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kv_heads, head_dim = paged.keys.shape[1], paged.keys.shape[3]
    work = DecodeItems.cut(
        np.array(contexts), paged.starts, num_kv_heads=kv_heads, num_threads=num_threads, window=window
    )
    parts = np.full((work.num_parts, queries.shape[1] // kv_heads, head_dim + 2), np.nan, np.float32)
    out = torch.full(queries.shape, torch.nan, dtype=paged.keys.dtype)
    attend_decodes(
        queries.numpy(),
        as_array(paged.keys),
        as_array(paged.values),
        torch.cat(paged.tables).numpy(),
        work.items,
        work.merges,
        parts,
        as_array(out),
        np.float32(head_dim**-0.5),
        np.float32(softcap or 0),
        _sinks(sinks, queries.shape[1]),
    )
    return out


def chunks(
    paged: Paged,
    queries: torch.Tensor,
    spans: list[tuple[int, int, int]],
    out: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    as_decodes: bool = False,
) -> None:
    """Attends spans (first row, tokens, context), one for each sequence of `paged`, as a step does."""
    starts = np.cumsum([0, *(len(table) for table in paged.tables)])[:-1]
    kv_heads = paged.keys.shape[1]
    items = cut_chunks(
        np.array([(*span, start) for span, start in zip(spans, starts, strict=True)]),
        lanes=TILE_COLUMNS,
        num_kv_heads=kv_heads,
        group=queries.shape[1] // kv_heads,
        num_threads=2,
        window=window,
    )
    tables = np.concatenate([table.numpy() for table in paged.tables])
    factors = np.float32(queries.shape[2] ** -0.5), np.float32(softcap or 0), _sinks(sinks, queries.shape[1])
    keys, values = as_array(paged.keys), as_array(paged.values)
    attend_chunks(queries.numpy(), keys, values, tables, items, as_array(out), *factors, as_decodes)


def _sinks(sinks: torch.Tensor | None, heads: int) -> npt.NDArray[np.float32]:
    return np.full(heads, NO_SINK, np.float32) if sinks is None else sinks.numpy()
