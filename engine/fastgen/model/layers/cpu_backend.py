"""Operations on CPUs, by the project's kernels.

In bfloat16 the results of operations and the cache are rounded. The residual stream and queries stay float32, and so
does all arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.kernels.cpu import elementwise
from fastgen.kernels.cpu.attention.decode import NO_SINK, attend_decodes
from fastgen.kernels.cpu.attention.prefill import attend_chunks
from fastgen.kernels.cpu.attention.work_items import DecodeItems, cut_chunks
from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.matmul.tile import ROWS
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.config.architecture import Activation, Heads, ModelArchitecture
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.backend import Operations
from fastgen.model.layers.linear import as_array, padded_rows
from fastgen.model.layers.linear_attention import DeltaWeights, linear_attention
from fastgen.model.layers.moe import mixture_of_experts
from fastgen.model.layers.rope import Rope, query_scales
from fastgen.model.layers.weights import Mixture

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_ACTIVATE: dict[Activation, Callable[[ElementArray, ElementArray], None]] = {
    "silu": elementwise.silu_multiply,
    "gelu_tanh": elementwise.gelu_tanh_multiply,
    "clamped_swiglu": elementwise.clamped_swiglu_multiply,
}


class CPUBackend:
    """The backend for the CPUs of one machine; see `backend.Backend`.

    Args:
        ropes: one for each of the architecture's RoPE configurations.
        dtype: of activations.
        pads_rows: `PackedFormat.pads_rows` of the weights.
        deterministic: whether a token's attention must not depend on the step.

    Raises:
        ModelError: if the kernels cannot compute the model's head size.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        ropes: Sequence[Rope],
        dtype: torch.dtype,
        pads_rows: bool,
        deterministic: bool = False,
    ) -> None:
        if dtype == torch.bfloat16:
            from fastgen.kernels.cpu import bfloat16  # noqa: F401  (importing it compiles the kernels)
        for heads in (architecture.heads, architecture.other_heads or architecture.heads):
            if heads.head_dim % ROWS:
                # Tile size of the prefill attention kernel.
                raise ModelError(
                    f"head size {heads.head_dim}: on a CPU it must be a multiple of {ROWS}; use --device cuda"
                )
        self.architecture = architecture
        self.ropes = ropes
        self.dtype = dtype
        self.pads_rows = pads_rows
        self.deterministic = deterministic
        self.no_sinks = np.full(architecture.num_heads, NO_SINK, np.float32)
        self.places = {apart: architecture.places_of(by_window=apart) for apart in (False, True)}
        self._weights: dict[int, tuple[torch.Tensor, FloatArray]] = {}

    def __call__(self, forward_input: ForwardInput, cache: KVCache) -> Operations:
        """Return the operations of a step."""
        return _CPUOperations(self, forward_input, cache)

    def array(self, weight: torch.Tensor) -> FloatArray:
        """Return a weight as an array. Both are cached, because the cache key is the tensor's id."""
        kept = self._weights.get(id(weight))
        if kept is None:
            kept = self._weights[id(weight)] = (weight, weight.numpy())
        return kept[1]


class _Scratch:
    """Scratch memory [rows, ...] as a tensor and as an array.

    After a large product the processor's caches hold nothing of Python or torch, and converting a tensor to an array
    takes longer than many kernels. So it is converted once.
    """

    __slots__ = ("array", "flat", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.flat = tensor.flatten(1)
        self.array = as_array(tensor)

    def first(self, rows: int) -> _Scratch:
        """Return the first rows."""
        return self if rows == len(self.array) else _Scratch(self.tensor[:rows])


class _AttentionScratch:
    """Scratch memory of the layers with the same heads: queries and results of attention."""

    __slots__ = ("attended", "queries")

    def __init__(self, heads: Heads, num_heads: int, rows: int, padded: int, dtype: torch.dtype) -> None:
        self.queries = _Scratch(torch.empty(rows, num_heads, heads.head_dim))
        self.attended = _Scratch(torch.empty(padded, num_heads, heads.head_dim, dtype=dtype))
        self.attended.tensor[rows:] = 0  # freed memory may hold NaN, which is slow to compute with


class _LayersOfHeads:
    """Cache and scratch memory of the layers with the same heads and the same blocks."""

    __slots__ = ("attended", "heads", "keys", "queries", "values")

    def __init__(self, heads: Heads, cache: KVCache, scratch: _AttentionScratch) -> None:
        self.heads = heads
        self.keys, self.values = as_array(cache.keys), as_array(cache.values)
        self.queries, self.attended = scratch.queries, scratch.attended


@dataclass(frozen=True, slots=True)
class _Work:
    """Attention work items, shared by all layers with the same window, heads and chunks."""

    items: DecodeItems
    parts: FloatArray
    chunks: IntArray


class _CPUOperations(Operations):
    """Operations of one step; see `backend.Operations`.

    For oneDNN's products, rows are padded as by `padded_rows`. No result depends on padding rows.
    """

    def __init__(self, backend: CPUBackend, forward_input: ForwardInput, cache: KVCache) -> None:
        a = backend.architecture
        self._backend = backend
        self._forward_input = forward_input
        self._dtype = backend.dtype
        self._linear_attention = linear_attention(a, forward_input, cache, torch.device("cpu"))
        self._epsilon = np.float32(a.rms_norm_eps)
        self._scale, self._softcap = np.float32(a.attention_scale), np.float32(a.attention_softcap or 0)
        self._activate = _ACTIVATE[a.activation]
        positions = torch.from_numpy(forward_input.positions)
        scaling = a.query_scaling
        self._query_scales = None if scaling is None else query_scales(scaling, positions)
        self._rotations = [tuple(part.numpy() for part in rope(positions)) for rope in backend.ropes]
        self._places = backend.places[cache.windowed is not None]
        # Of layers with a window.
        self._windowed, window_cache = cache.of_windows(forward_input, forward_input.windowed)
        kinds = {(layer.window, layer.heads, layer.chunk) for layer in a.layers}
        self._work = {kind: self._plan(*kind, cache.block_size) for kind in kinds}
        self._logit_rows = torch.from_numpy(forward_input.logit_rows)
        self._rows = forward_input.num_rows
        rows = padded_rows(self._rows) if backend.pads_rows else self._rows
        self._padding = rows - self._rows
        # The last layer has more rows than the step has tokens if several logprobs are requested after one token.
        most_rows = max(rows, len(forward_input.logit_rows))
        self._normed = _Scratch(torch.empty(most_rows, a.hidden_size, dtype=self._dtype))
        self._activated = torch.empty(most_rows * a.intermediate_size, dtype=self._dtype)
        self._gated: dict[tuple[int, int], _Scratch] = {}
        self._of_heads: dict[tuple[Heads | None, bool], _LayersOfHeads] = {}
        for kind, *parts in zip((None, a.other_heads), cache.by_heads, window_cache.by_heads, strict=False):
            scratch = _AttentionScratch(kind or a.heads, a.num_heads, self._rows, rows, self._dtype)
            for is_windowed, part in zip((False, True), parts, strict=True):
                self._of_heads[kind, is_windowed] = _LayersOfHeads(kind or a.heads, part, scratch)
        self._stream: tuple[torch.Tensor, FloatArray] | None = None

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        stream = table(F.pad(torch.from_numpy(self._forward_input.token_ids), (0, self._padding)))
        return stream if scale == 1 else stream.mul_(scale)

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        if weight is None:
            return self._add(stream, update, update_weight)
        if self._stream is None or self._stream[0] is not stream:
            self._stream = (stream, stream.numpy())
        if update is None:
            update = torch.zeros(stream.shape, dtype=self._dtype)
        added = as_array(update)
        if update_weight is not None:
            elementwise.rms_norm(added, self._backend.array(update_weight), self._epsilon)
        out = self._normed.first(len(update))
        elementwise.add_rms_norm(self._stream[1], added, self._backend.array(weight), self._epsilon, out.array)
        return out.tensor

    def _add(
        self, stream: torch.Tensor, update: torch.Tensor | None, update_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to the stream as `add_norm`, without a norm of the sum."""
        if update is not None:
            if update_weight is not None:
                elementwise.rms_norm(as_array(update), self._backend.array(update_weight), self._epsilon)
            stream += update
        return stream if self._dtype == stream.dtype else self._normed.tensor[: len(stream)].copy_(stream)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        a, backend = self._backend.architecture, self._backend
        kind, mixed, place = a.layers[layer], as_array(qkv)[: self._rows], self._places[layer]
        forward_input = self._windowed if kind.is_windowed else self._forward_input
        own = self._of_heads[kind.heads, kind.is_windowed]
        keys, values, queries, out = own.keys[place], own.values[place], own.queries.array, own.attended.array
        stored = own.heads.num_kv_heads if kind.kv_layer is None else 0
        if query_norm is not None:
            norms = backend.array(query_norm), backend.array(query_norm if key_norm is None else key_norm)
            segments = (1, 1) if a.qk_norm == "whole" else (a.num_heads, stored)
            elementwise.norm_heads(mixed, *norms, *segments, self._epsilon)
        cosines, sines = self._rotations[kind.rope]
        new_keys, new_values = keys[:, :stored], values[:, :stored]
        elementwise.rotate_and_store(
            mixed, cosines, sines, new_keys, new_values, forward_input.blocks, forward_input.slots, queries
        )
        if self._query_scales is not None and kind.scales_queries:
            own.queries.tensor.mul_(self._query_scales[:, :, None])
        work = self._work[kind.window, kind.heads, kind.chunk]
        factors = self._scale, self._softcap, backend.no_sinks if sinks is None else backend.array(sinks)
        if len(work.items.items):
            items, merges = work.items.items, work.items.merges
            attend_decodes(queries, keys, values, forward_input.tables, items, merges, work.parts, out, *factors)
        if len(work.chunks):
            as_decodes = backend.deterministic
            attend_chunks(queries, keys, values, forward_input.tables, work.chunks, out, *factors, as_decodes)
        return own.attended.flat

    def attend_linearly(self, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        assert self._linear_attention is not None
        rows = self._rows
        attended = self._linear_attention.attend(self._places[layer], weights, qkvz[:rows], ba[:rows])
        return F.pad(attended, (0, 0, 0, self._padding)) if self._padding else attended

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        out = self._gated.get(shape)
        if out is None:
            out = self._gated[shape] = _Scratch(self._activated[: math.prod(shape)].view(shape))
        self._activate(as_array(gate_up), out.array)
        return out.tensor

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        out = mixture_of_experts(mixture, x[: self._rows], self.activate)
        return out if len(out) == len(x) else F.pad(out, (0, 0, 0, len(x) - len(out)))

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        self._rows = len(self._logit_rows)  # from here on, without padding
        return x.index_select(0, self._logit_rows)

    def _plan(self, window: int | None, kind: Heads | None, chunk: int | None, block_size: int) -> _Work:
        a, forward_input = self._backend.architecture, self._forward_input if window is None else self._windowed
        if chunk is not None:
            forward_input = forward_input.within_chunks(chunk, block_size)
        heads = kind or a.heads
        group = a.num_heads // heads.num_kv_heads
        items = DecodeItems.cut(
            forward_input.contexts,
            forward_input.table_starts,
            num_kv_heads=heads.num_kv_heads,
            num_threads=torch.get_num_threads(),
            window=window,
        )
        chunks = [(span.row, span.num_tokens, span.context, span.table_start) for span in forward_input.chunks]
        return _Work(
            items=items,
            parts=np.empty((items.num_parts, group, heads.head_dim + 2), np.float32),
            chunks=cut_chunks(
                np.array(chunks, np.int64).reshape(-1, 4),
                lanes=TILE_COLUMNS,
                num_kv_heads=heads.num_kv_heads,
                group=group,
                num_threads=torch.get_num_threads(),
                window=window,
            ),
        )
