"""The Llama family's forward pass over a paged KV cache, in float32 on CPUs.

A pass mixes decodes and prompt chunks; its rows are all its tokens, without padding. Products run packed (`linear`),
attention and the element-wise steps on the project's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fastgen.kernels import elementwise
from fastgen.kernels.chunk import ChunkPlan, attend_chunk
from fastgen.kernels.decode import attend_decodes
from fastgen.kernels.items import decode_items
from fastgen.model.architecture import ModelArchitecture
from fastgen.model.batch import Batch
from fastgen.model.cache import KVShape
from fastgen.model.checkpoint import Checkpoint
from fastgen.model.kv_cache import KVCache
from fastgen.model.rope import Rope
from fastgen.model.source import ModelSource
from fastgen.model.weights import LlamaWeights


class Llama:
    """The forward pass over given weights."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, weights: LlamaWeights) -> None:
        a = weights.architecture
        self.architecture = a
        self.kv_shape = KVShape(a.num_layers, a.num_kv_heads, key_dim=a.head_dim, value_dim=a.head_dim)
        self._weights = weights
        self._rope = Rope(a, weights.rope_factors)

    @classmethod
    def load(cls, source: ModelSource, progress: Callable[[float], None]) -> Llama:
        """The model at `source`; `progress` hears the share done, 0 to 1.

        Raises:
            ModelError: when a tensor cannot be used.
        """
        return cls(LlamaWeights.load(source.architecture, Checkpoint.open(source), progress))

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Computes a pass: writes its keys and values to the cache, returns [R, hidden] of the rows with logits."""
        weights, architecture = self._weights, self._weights.architecture
        attention = _PassAttention(architecture, batch, cache, self._rope)
        epsilon = np.float32(architecture.rms_norm_eps)
        x = weights.embedding.index_select(0, torch.from_numpy(batch.token_ids))  # [T, hidden], the residual stream
        residual = x.numpy()
        normed = torch.empty_like(x)
        activated = torch.empty(batch.num_rows, architecture.intermediate_size)
        update = torch.zeros_like(x)  # what the last product adds to the stream, added by the next norm
        for index, layer in enumerate(weights.layers):
            elementwise.add_rms_norm(residual, update.numpy(), layer.input_norm, epsilon, normed.numpy())
            update = layer.attention_output(attention.attend(index, layer.qkv(normed)))
            elementwise.add_rms_norm(residual, update.numpy(), layer.mlp_norm, epsilon, normed.numpy())
            elementwise.silu_multiply(layer.gate_up(normed).numpy(), activated.numpy())
            update = layer.down(activated)
        rows = torch.from_numpy(batch.logit_rows)
        wanted, wanted_update = x.index_select(0, rows), update.index_select(0, rows)
        final = torch.empty_like(wanted)
        elementwise.add_rms_norm(wanted.numpy(), wanted_update.numpy(), weights.final_norm, epsilon, final.numpy())
        return final

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> logits [R, vocabulary]."""
        if not len(hidden):
            return torch.empty(0, self.architecture.vocab_size)
        return self._weights.head(hidden)


class _PassAttention:
    """Attention within one pass: what all its layers share."""

    def __init__(self, architecture: ModelArchitecture, batch: Batch, cache: KVCache, rope: Rope) -> None:
        a = architecture
        self._batch = batch
        self._cache = cache
        self._scale = a.head_dim**-0.5
        cosines, sines = rope(torch.from_numpy(batch.positions))
        self._cosines, self._sines = cosines.numpy(), sines.numpy()
        self._queries = torch.empty(batch.num_rows, a.num_heads, a.head_dim)
        self._out = torch.empty(batch.num_rows, a.num_heads, a.head_dim)
        self._items, self._merges, num_parts = decode_items(
            batch.contexts, batch.table_starts, num_kv_heads=a.num_kv_heads, num_threads=torch.get_num_threads()
        )
        self._parts = np.empty((num_parts, a.heads_per_kv_head, a.head_dim + 2), np.float32)
        self._chunks = [
            ChunkPlan.make(span.row, span.num_tokens, span.context, torch.from_numpy(span.blocks))
            for span in batch.chunks
        ]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[T, (heads + 2 * kv heads) * head_dim] -> [T, heads * head_dim]; overwritten by the next layer's."""
        batch, keys, values = self._batch, self._cache.keys[layer], self._cache.values[layer]
        k, v, queries = keys.numpy(), values.numpy(), self._queries.numpy()
        elementwise.rotate_and_store(qkv.numpy(), self._cosines, self._sines, k, v, batch.blocks, batch.slots, queries)
        if len(self._items):
            out, scale = self._out.numpy(), np.float32(self._scale)
            attend_decodes(queries, k, v, batch.tables, self._items, self._merges, self._parts, out, scale)
        for plan in self._chunks:
            attend_chunk(plan, self._queries, keys, values, self._out, self._scale)
        return self._out.flatten(1)
