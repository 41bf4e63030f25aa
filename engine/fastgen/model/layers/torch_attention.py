"""Paged attention in torch's own operations, on any device and in any floating type.

Pages are gathered and attended by `scaled_dot_product_attention`. Decodes of about the same length share one call;
each chunk has calls of its own. Twin: `fastgen.kernels.reference.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.step_input import ChunkSpan, StepInput

# Numbers gathered, or scores masked, by one call: bounds the scratch memory, 128 MiB of them in bfloat16.
MAX_SCRATCH_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries that one call attends: n sequences of q rows each, over L keys, padded.

    The G query heads that share a key-value head count as more queries of it: no key is copied for them.

    Attributes:
        rows: [n * q], of the pass.
        num_queries: q.
        pages: [n, P] blocks whose L = P * block size keys are gathered.
        visible: [n, 1, G * q, L], or [n, 1, 1, L] where all see the same keys; None where each of the q rows sees the
            first keys up to its own.
    """

    rows: slice | torch.Tensor
    num_queries: int
    pages: torch.Tensor
    visible: torch.Tensor | None


class TorchPagedAttention:
    """Attention within one pass: what all its layers share.

    Args:
        batch: the pass, with T rows.
        cache: its keys and values.
        device: where the cache is.
    """

    def __init__(self, batch: StepInput, cache: KVCache, device: torch.device) -> None:
        self._batch = batch
        self._cache = cache
        self._device = device
        self._blocks, self._slots = self._moved(batch.blocks), self._moved(batch.slots)
        # By window and by query heads of a key-value head: layers may differ in either.
        self._parts: dict[tuple[int | None, int], list[_Part]] = {}

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the pass's keys and values, [T, kv heads, head_dim], to their slots of a layer."""
        # Some models turn their queries and keys in float32, whatever their own type is.
        self._cache.keys[layer][self._blocks, :, self._slots] = keys.to(self._cache.keys.dtype)
        self._cache.values[layer][self._blocks, :, self._slots] = values.to(self._cache.values.dtype)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of every row over its sequence; the pass's own keys and values are stored before.

        Args:
            layer: which one.
            queries: [T, heads, head_dim].
            scale: on the scores.
            window: keys that a row sees, its own and those before it; None for all.
            softcap: scores are squeezed between plus and minus this (Gemma 2).
            sinks: [heads], a score for nothing, which takes its share of the softmax (Xiao et al., 2023).

        Returns:
            [T, heads, head_dim of the values].
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        group = queries.shape[1] // keys.shape[1]
        out = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for part in self._plan(window, group):
            q = queries[part.rows].to(keys.dtype).reshape(-1, part.num_queries, keys.shape[1], group, queries.shape[2])
            q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [n, kv heads, G * q, head_dim]
            k, v = _gather(keys, part.pages), _gather(values, part.pages)  # [n, kv heads, L, head_dim]
            if softcap is None and sinks is None:
                attended = _attend_fused(q, k, v, part, group, scale)
            else:
                attended = _attend_in_steps(q, k, v, part, group, scale, softcap, sinks)
            attended = attended.reshape(*attended.shape[:2], group, part.num_queries, -1)
            out[part.rows] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)  # from [n, q, kv heads, G, d]
        return out

    def _plan(self, window: int | None, group: int) -> list[_Part]:
        key = (window, group)
        if key not in self._parts:
            self._parts[key] = [*self._decode_parts(window), *self._chunk_parts(window, group)]
        return self._parts[key]

    def _decode_parts(self, window: int | None) -> Iterator[_Part]:
        """Decodes grouped by the power of two that their pages fit into: less than half of what is gathered is idle."""
        batch, size = self._batch, self._cache.block_size
        if not batch.num_decodes:
            return
        page_numbers = self._cache.keys[0, 0].numel()
        begins = np.maximum(batch.contexts - (window or batch.contexts), 0)
        first_pages = begins // size
        num_pages = -(-batch.contexts // size) - first_pages
        classes = np.ceil(np.log2(num_pages))
        for number in np.unique(classes):
            rows = np.flatnonzero(classes == number)
            width = int(num_pages[rows].max())
            num_calls = min(len(rows), -(-len(rows) * width * page_numbers // MAX_SCRATCH_ELEMENTS))
            for some in np.array_split(rows, num_calls):
                # Pages beyond a sequence's last repeat that one: any that exists will do, its keys are not visible.
                index = np.minimum(np.arange(width), (num_pages[some] - 1)[:, None])
                pages = batch.tables[(batch.table_starts[some] + first_pages[some])[:, None] + index]
                positions = first_pages[some, None] * size + np.arange(width * size)
                visible = (positions >= begins[some, None]) & (positions < batch.contexts[some, None])
                yield _Part(self._moved(some), 1, self._moved(pages), self._moved(visible)[:, None, None])

    def _chunk_parts(self, window: int | None, group: int) -> Iterator[_Part]:
        """Each chunk, in slices of rows where the scores of all at once would be too many."""
        for span in self._batch.chunks:
            if span.context == 0 and (window is None or window >= span.num_tokens):
                rows = slice(span.row, span.row + span.num_tokens)
                yield _Part(rows, span.num_tokens, self._moved(span.blocks)[None], None)
                continue
            step = max(1, MAX_SCRATCH_ELEMENTS // (group * (span.context + span.num_tokens)))
            for first in range(0, span.num_tokens, step):
                yield self._slice(span, first, min(step, span.num_tokens - first), window, group)

    def _slice(self, span: ChunkSpan, first: int, count: int, window: int | None, group: int) -> _Part:
        """`count` rows of a chunk from its row `first`, over the pages that they see."""
        size, start = self._cache.block_size, span.context + first
        begin = 0 if window is None else max(0, start + 1 - window) // size
        blocks = span.blocks[begin : -(-(start + count) // size)]
        positions = torch.arange(start, start + count, device=self._device)[:, None]
        keys = torch.arange(begin * size, (begin + len(blocks)) * size, device=self._device)
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        rows = slice(span.row + first, span.row + first + count)
        return _Part(rows, count, self._moved(blocks)[None], visible.repeat(group, 1)[None, None])

    def _moved(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[blocks, kv heads, block size, head_dim] and [n, P] -> [n, kv heads, P * block size, head_dim]."""
    return cache[pages].transpose(1, 2).flatten(2, 3)


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part, group: int, scale: float
) -> torch.Tensor:
    """q [n, kv heads, G * q, head_dim] over k and v [n, kv heads, L, head_dim] -> as q, with the values' head_dim."""
    if part.visible is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=part.visible, scale=scale)
    n, kv_heads, _, head_dim = q.shape
    q = q.reshape(n, kv_heads * group, part.num_queries, head_dim)
    k, v = k[:, :, : part.num_queries], v[:, :, : part.num_queries]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
    return attended.reshape(n, kv_heads, group * part.num_queries, v.shape[-1])


def _attend_in_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: _Part,
    group: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with what the fused kernels lack, softmax in float32."""
    visible = part.visible
    if visible is None:
        visible = torch.ones(part.num_queries, k.shape[2], dtype=torch.bool, device=q.device).tril().repeat(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [n, kv heads, G * q, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        own = sinks.float().reshape(-1, group, 1).expand(-1, -1, part.num_queries).flatten(1)  # [kv heads, G * q]
        scores = torch.cat([scores, own.expand(len(q), -1, -1)[..., None]], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
