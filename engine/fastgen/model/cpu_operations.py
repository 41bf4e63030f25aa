"""The operations of a pass in float32 on CPUs, by the project's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels import chunk_items, elementwise
from fastgen.kernels.chunk import LANES, attend_chunks
from fastgen.kernels.decode import attend_decodes
from fastgen.kernels.items import DecodeItems
from fastgen.model.architecture import Activation, ModelArchitecture
from fastgen.model.batch import Batch
from fastgen.model.checkpoint import Table
from fastgen.model.kv_cache import KVCache
from fastgen.model.rope import Rope

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_ACTIVATE: dict[Activation, Callable[[FloatArray, FloatArray], None]] = {
    "silu": elementwise.silu_multiply,
    "gelu_tanh": elementwise.gelu_tanh_multiply,
}


@dataclass(frozen=True, slots=True)
class CPUBackend:
    """CPUs of one machine.

    Attributes:
        architecture: of the model.
        ropes: one for each of the architecture's rotaries.
    """

    architecture: ModelArchitecture
    ropes: Sequence[Rope]

    def begin(self, batch: Batch, cache: KVCache) -> CPUOperations:
        """The operations of a pass."""
        return CPUOperations(self, batch, cache)


@dataclass(frozen=True, slots=True)
class _Work:
    """The attention of all layers with the same window."""

    items: DecodeItems
    parts: FloatArray
    chunks: IntArray


class CPUOperations:
    """The steps of one pass; see `operations.Operations`."""

    def __init__(self, backend: CPUBackend, batch: Batch, cache: KVCache) -> None:
        a = backend.architecture
        self._architecture = a
        self._batch = batch
        self._cache = cache
        self._epsilon = np.float32(a.rms_norm_eps)
        self._activate = _ACTIVATE[a.activation]
        positions = torch.from_numpy(batch.positions)
        self._turns = [tuple(part.numpy() for part in rope(positions)) for rope in backend.ropes]
        self._work = {window: self._plan(window) for window in {layer.window for layer in a.layers}}
        self._normed = torch.empty(batch.num_rows, a.hidden_size)
        self._activated = torch.empty(batch.num_rows * a.intermediate_size)
        self._queries = torch.empty(batch.num_rows, a.num_heads, a.head_dim)
        self._attended = torch.empty(batch.num_rows, a.num_heads, a.head_dim)

    def embed(self, table: Table, scale: float) -> torch.Tensor:
        """The embeddings of the pass's tokens."""
        stream = table(torch.from_numpy(self._batch.token_ids))
        return stream if scale == 1 else stream.mul_(scale)

    def add_norm(self, stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds in place and normalises."""
        out = self._normed[: len(stream)]
        elementwise.add_rms_norm(stream.numpy(), update.numpy(), weight.numpy(), self._epsilon, out.numpy())
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalises in place."""
        elementwise.rms_norm(x.numpy(), weight.numpy(), self._epsilon)
        return x

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention with everything before it."""
        a, batch, kind = self._architecture, self._batch, self._architecture.layers[layer]
        k, v = self._cache.keys[layer].numpy(), self._cache.values[layer].numpy()
        queries = self._queries.numpy()
        if query_norm is not None and key_norm is not None:
            elementwise.norm_heads(
                qkv.numpy(), query_norm.numpy(), key_norm.numpy(), a.num_heads, a.num_kv_heads, self._epsilon
            )
        cosines, sines = self._turns[kind.rotary]
        elementwise.rotate_and_store(qkv.numpy(), cosines, sines, k, v, batch.blocks, batch.slots, queries)
        work, cap = self._work[kind.window], np.float32(a.attention_softcap or 0)
        out, scale = self._attended.numpy(), np.float32(a.attention_scale)
        if len(work.items.items):
            items, merges = work.items.items, work.items.merges
            attend_decodes(queries, k, v, batch.tables, items, merges, work.parts, out, scale, cap)
        if len(work.chunks):
            attend_chunks(queries, k, v, batch.tables, work.chunks, out, scale, cap)
        return self._attended.flatten(1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of the gate times the rest."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._activated[: rows * width].view(rows, width)
        self._activate(gate_up.numpy(), out.numpy())
        return out

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows whose logits are wanted."""
        return x.index_select(0, torch.from_numpy(self._batch.logit_rows))

    def _plan(self, window: int | None) -> _Work:
        a, batch = self._architecture, self._batch
        items = DecodeItems.cut(
            batch.contexts,
            batch.table_starts,
            num_kv_heads=a.num_kv_heads,
            num_threads=torch.get_num_threads(),
            window=window,
        )
        chunks = [(span.row, span.num_tokens, span.context, span.table_start) for span in batch.chunks]
        return _Work(
            items=items,
            parts=np.empty((items.num_parts, a.heads_per_kv_head, a.head_dim + 2), np.float32),
            chunks=chunk_items.cut(
                np.array(chunks, np.int64).reshape(-1, 4),
                lanes=LANES,
                num_kv_heads=a.num_kv_heads,
                group=a.heads_per_kv_head,
                num_threads=torch.get_num_threads(),
                window=window,
            ),
        )
