"""The Llama family's forward pass over a paged KV cache, in float32 on CPUs.

A pass mixes decodes and prompt chunks; its rows are all its tokens, without padding. Products run packed (`linear`),
attention and the element-wise steps on the project's kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from fastgen.kernels import elementwise
from fastgen.kernels.chunk import ChunkPlan, attend_chunk
from fastgen.kernels.decode import attend_decodes
from fastgen.model.architecture import ModelArchitecture
from fastgen.model.batch import Batch
from fastgen.model.rope import Rope
from fastgen.model.weights import LlamaWeights


class KVCache:
    """Keys and values of all layers, each [layers, blocks, kv heads, block size, head_dim] float32.

    Zeroed, so that slots nobody has written hold no NaN. By NumPy, which leaves that to the kernel: a page of memory is
    taken when it is first written, while torch would write all of them now.
    """

    def __init__(self, architecture: ModelArchitecture, num_blocks: int, block_size: int) -> None:
        shape = (architecture.num_layers, num_blocks, architecture.num_kv_heads, block_size, architecture.head_dim)
        self.keys = torch.from_numpy(np.zeros(shape, np.float32))
        self.values = torch.from_numpy(np.zeros(shape, np.float32))


class Llama:
    """The forward pass over given weights."""

    def __init__(self, weights: LlamaWeights) -> None:
        self._weights = weights
        self._rope = Rope(weights.architecture, weights.rope_factors)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Computes a pass: writes its keys and values to the cache, returns logits [S, vocabulary] of sampled rows."""
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
        if not len(batch.sample_rows):
            return torch.empty(0, architecture.vocab_size)
        rows = torch.from_numpy(batch.sample_rows)
        sampled, sampled_update = x.index_select(0, rows), update.index_select(0, rows)
        final = torch.empty_like(sampled)
        elementwise.add_rms_norm(sampled.numpy(), sampled_update.numpy(), weights.final_norm, epsilon, final.numpy())
        return weights.head(final)


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
        self._parts = np.empty((batch.num_parts, a.heads_per_kv_head, a.head_dim + 2), np.float32)
        self._chunks = [
            ChunkPlan.make(span.row, span.num_tokens, span.context, torch.from_numpy(span.blocks))
            for span in batch.chunks
        ]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[T, (heads + 2 * kv heads) * head_dim] -> [T, heads * head_dim]; overwritten by the next layer's."""
        batch, keys, values = self._batch, self._cache.keys[layer], self._cache.values[layer]
        k, v, queries = keys.numpy(), values.numpy(), self._queries.numpy()
        elementwise.rotate_and_store(qkv.numpy(), self._cosines, self._sines, k, v, batch.blocks, batch.slots, queries)
        if len(batch.items):
            out, scale = self._out.numpy(), np.float32(self._scale)
            attend_decodes(queries, k, v, batch.tables, batch.items, batch.merges, self._parts, out, scale)
        for plan in self._chunks:
            attend_chunk(plan, self._queries, keys, values, self._out, self._scale)
        return self._out.flatten(1)
