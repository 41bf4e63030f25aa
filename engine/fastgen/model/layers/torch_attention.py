"""Paged attention with torch operations, on any device and in any floating type.

Gathers pages and calls `scaled_dot_product_attention`, or computes scores and softmax itself for a softcap or sinks.
Decodes of similar length share a call; each chunk has its own calls. Readable twin:
`fastgen.kernels.reference.paged_attention`.
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
from fastgen.model.forward_input import ChunkSpan, ForwardInput

# Most elements of keys that a call for decodes gathers, and most scores that a call for a chunk masks: 128 MiB in
# bfloat16.
MAX_SCRATCH_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class _Part:
    """The queries of one attention call: n sequences of q rows each, over L keys, padded.

    The G query heads that share a key-value head are treated as additional queries, so keys are not copied.

    Attributes:
        rows: [n * q], rows of the step.
        num_queries: q.
        pages: [n, P] blocks whose L = P * block size keys are gathered.
        visible: mask [n, 1, G * q, L], or [n, 1, 1, L] if it is the same for all rows; None for causal attention from
            the first key.
    """

    rows: slice | torch.Tensor
    num_queries: int
    pages: torch.Tensor
    visible: torch.Tensor | None


class TorchPagedAttention:
    """The attention of one step with T rows, with what all layers share. The cache is on `device`."""

    def __init__(self, forward_input: ForwardInput, cache: KVCache, device: torch.device) -> None:
        self._forward_input = forward_input
        self._cache = cache
        self._device = device
        self._blocks, self._slots = self._to_device(forward_input.blocks), self._to_device(forward_input.slots)
        # By window and by query heads per key-value head, because layers may differ in both.
        self._parts: dict[tuple[int | None, int], list[_Part]] = {}

    def store_and_attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Call `store`, then `attend` with its `options`."""
        self.store(layer, keys, values)
        return self.attend(layer, queries, **options)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values [T, kv heads, head_dim] to their slots in a layer's cache."""
        # Some models rotate queries and keys in float32 regardless of their dtype.
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
        """Compute causal attention of every row over its sequence. Call `store` first.

        Args:
            layer: index of the layer.
            queries: [T, heads, head_dim].
            scale: factor of the scores.
            window: number of keys that a row attends to, including its own; None for all.
            softcap: bound of the scores, applied by tanh (Gemma 2).
            sinks: [heads], an extra score without a value in each softmax (Xiao et al., 2023).

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
                attended = _attend_unfused(q, k, v, part, group, scale, softcap, sinks)
            attended = attended.reshape(*attended.shape[:2], group, part.num_queries, -1)
            out[part.rows] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)  # from [n, q, kv heads, G, d]
        return out

    def _plan(self, window: int | None, group: int) -> list[_Part]:
        key = (window, group)
        if key not in self._parts:
            self._parts[key] = [*self._decode_parts(window), *self._chunk_parts(window, group)]
        return self._parts[key]

    def _decode_parts(self, window: int | None) -> Iterator[_Part]:
        """Yield decodes grouped by their number of pages.

        The number is rounded up to a power of two, so padding stays below half.
        """
        forward_input, size = self._forward_input, self._cache.block_size
        if not forward_input.num_decodes:
            return
        page_numbers = self._cache.keys[0, 0].numel()
        begins = np.maximum(forward_input.contexts - (window or forward_input.contexts), 0)
        first_pages = begins // size
        num_pages = -(-forward_input.contexts // size) - first_pages
        classes = np.ceil(np.log2(num_pages))
        for number in np.unique(classes):
            rows = np.flatnonzero(classes == number)
            width = int(num_pages[rows].max())
            num_calls = min(len(rows), -(-len(rows) * width * page_numbers // MAX_SCRATCH_ELEMENTS))
            for some in np.array_split(rows, num_calls):
                # Pad with the sequence's last page: its repeated keys are masked.
                index = np.minimum(np.arange(width), (num_pages[some] - 1)[:, None])
                pages = forward_input.tables[(forward_input.table_starts[some] + first_pages[some])[:, None] + index]
                positions = first_pages[some, None] * size + np.arange(width * size)
                visible = (positions >= begins[some, None]) & (positions < forward_input.contexts[some, None])
                yield _Part(self._to_device(some), 1, self._to_device(pages), self._to_device(visible)[:, None, None])

    def _chunk_parts(self, window: int | None, group: int) -> Iterator[_Part]:
        """Yield each chunk: whole if it begins its sequence and no window hides keys, else in slices.

        The scores of a slice fit the scratch memory.
        """
        for span in self._forward_input.chunks:
            if span.context == 0 and (window is None or window >= span.num_tokens):
                rows = slice(span.row, span.row + span.num_tokens)
                yield _Part(rows, span.num_tokens, self._to_device(span.blocks)[None], None)
                continue
            step = max(1, MAX_SCRATCH_ELEMENTS // (group * (span.context + span.num_tokens)))
            for first in range(0, span.num_tokens, step):
                yield self._slice(span, first, min(step, span.num_tokens - first), window, group)

    def _slice(self, span: ChunkSpan, first: int, count: int, window: int | None, group: int) -> _Part:
        """Return `count` rows of a chunk from its row `first`, with the pages that they attend to."""
        size, start = self._cache.block_size, span.context + first
        begin = 0 if window is None else max(0, start + 1 - window) // size
        blocks = span.blocks[begin : -(-(start + count) // size)]
        positions = torch.arange(start, start + count, device=self._device)[:, None]
        keys = torch.arange(begin * size, (begin + len(blocks)) * size, device=self._device)
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        rows = slice(span.row + first, span.row + first + count)
        return _Part(rows, count, self._to_device(blocks)[None], visible.repeat(group, 1)[None, None])

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Gather pages [n, P] of [blocks, kv heads, block size, head_dim].

    The result is [n, kv heads, P * block size, head_dim].
    """
    return cache[pages].transpose(1, 2).flatten(2, 3)


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part, group: int, scale: float
) -> torch.Tensor:
    """Attend q [n, kv heads, G * q, head_dim] over k, v [n, kv heads, L, head_dim].

    The result has q's shape with v's head_dim.
    """
    if part.visible is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=part.visible, scale=scale)
    n, kv_heads, _, head_dim = q.shape
    q = q.reshape(n, kv_heads * group, part.num_queries, head_dim)
    k, v = k[:, :, : part.num_queries], v[:, :, : part.num_queries]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
    return attended.reshape(n, kv_heads, group * part.num_queries, v.shape[-1])


def _attend_unfused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: _Part,
    group: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with the softcap and sinks that fused kernels lack, with the softmax in float32."""
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
