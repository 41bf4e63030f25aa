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
from fastgen.kernels.cpu.attention.decode import attend_decodes
from fastgen.kernels.cpu.attention.prefill import attend_chunks
from fastgen.kernels.cpu.attention.work_items import DecodeItems, cut_chunks
from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.matmul.tile import ROWS
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.config.architecture import Activation, ModelArchitecture
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.backend import Operations
from fastgen.model.layers.linear import as_array, padded_rows
from fastgen.model.layers.moe import mixture_of_experts
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.weights import Mixture

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_ACTIVATE: dict[Activation, Callable[[ElementArray, ElementArray], None]] = {
    "silu": elementwise.silu_multiply,
    "gelu_tanh": elementwise.gelu_tanh_multiply,
}


class CPUBackend:
    """The backend for the CPUs of one machine; see `backend.Backend`.

    Args:
        ropes: one for each of the architecture's RoPE configurations.
        dtype: of activations.
        pads_rows: `PackedFormat.pads_rows` of the weights.

    Raises:
        ModelError: if the kernels cannot compute the model's head size.
    """

    def __init__(
        self, architecture: ModelArchitecture, ropes: Sequence[Rope], dtype: torch.dtype, pads_rows: bool
    ) -> None:
        if dtype == torch.bfloat16:
            from fastgen.kernels.cpu import bfloat16  # noqa: F401  (importing it compiles the kernels)
        if architecture.head_dim % ROWS:
            # Tile size of the prefill attention kernel.
            raise ModelError(
                f"head size {architecture.head_dim}: on a CPU it must be a multiple of {ROWS}; use --device cuda"
            )
        self.architecture = architecture
        self.ropes = ropes
        self.dtype = dtype
        self.pads_rows = pads_rows
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


@dataclass(frozen=True, slots=True)
class _Work:
    """Attention work items, shared by all layers with the same window."""

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
        self._keys, self._values = as_array(cache.keys), as_array(cache.values)
        self._epsilon = np.float32(a.rms_norm_eps)
        self._scale, self._softcap = np.float32(a.attention_scale), np.float32(a.attention_softcap or 0)
        self._activate = _ACTIVATE[a.activation]
        positions = torch.from_numpy(forward_input.positions)
        self._rotations = [tuple(part.numpy() for part in rope(positions)) for rope in backend.ropes]
        self._work = {window: self._plan(window) for window in {layer.window for layer in a.layers}}
        self._logit_rows = torch.from_numpy(forward_input.logit_rows)
        self._rows = forward_input.num_rows
        rows = padded_rows(self._rows) if backend.pads_rows else self._rows
        self._padding = rows - self._rows
        # The last layer has more rows than the step has tokens if several logprobs are requested after one token.
        most_rows = max(rows, len(forward_input.logit_rows))
        self._normed = _Scratch(torch.empty(most_rows, a.hidden_size, dtype=self._dtype))
        self._activated = torch.empty(most_rows * a.intermediate_size, dtype=self._dtype)
        self._gated: dict[tuple[int, int], _Scratch] = {}
        self._queries = _Scratch(torch.empty(self._rows, a.num_heads, a.head_dim))
        self._attended = _Scratch(torch.empty(rows, a.num_heads, a.head_dim, dtype=self._dtype))
        self._attended.tensor[self._rows :] = 0  # freed memory may hold NaN, which is slow to compute with
        self._stream: tuple[torch.Tensor, FloatArray] | None = None

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        stream = table(F.pad(torch.from_numpy(self._forward_input.token_ids), (0, self._padding)))
        return stream if scale == 1 else stream.mul_(scale)

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> torch.Tensor:
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

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        a, forward_input, backend = self._backend.architecture, self._forward_input, self._backend
        kind, mixed = a.layers[layer], as_array(qkv)[: self._rows]
        keys, values, queries, out = self._keys[layer], self._values[layer], self._queries.array, self._attended.array
        if query_norm is not None and key_norm is not None:
            norms = backend.array(query_norm), backend.array(key_norm)
            elementwise.norm_heads(mixed, *norms, a.num_heads, a.num_kv_heads, self._epsilon)
        cosines, sines = self._rotations[kind.rope]
        elementwise.rotate_and_store(
            mixed, cosines, sines, keys, values, forward_input.blocks, forward_input.slots, queries
        )
        work, factors = self._work[kind.window], (self._scale, self._softcap)
        if len(work.items.items):
            items, merges = work.items.items, work.items.merges
            attend_decodes(queries, keys, values, forward_input.tables, items, merges, work.parts, out, *factors)
        if len(work.chunks):
            attend_chunks(queries, keys, values, forward_input.tables, work.chunks, out, *factors)
        return self._attended.flat

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

    def _plan(self, window: int | None) -> _Work:
        a, forward_input = self._backend.architecture, self._forward_input
        items = DecodeItems.cut(
            forward_input.contexts,
            forward_input.table_starts,
            num_kv_heads=a.num_kv_heads,
            num_threads=torch.get_num_threads(),
            window=window,
        )
        chunks = [(span.row, span.num_tokens, span.context, span.table_start) for span in forward_input.chunks]
        return _Work(
            items=items,
            parts=np.empty((items.num_parts, a.heads_per_kv_head, a.head_dim + 2), np.float32),
            chunks=cut_chunks(
                np.array(chunks, np.int64).reshape(-1, 4),
                lanes=TILE_COLUMNS,
                num_kv_heads=a.num_kv_heads,
                group=a.heads_per_kv_head,
                num_threads=torch.get_num_threads(),
                window=window,
            ),
        )
