"""The Llama family's forward pass over a paged KV cache, in float32 on CPUs.

A pass mixes decodes and prompt chunks; its rows are all its tokens, without padding. Products run packed (`linear`),
attention and the element-wise steps on the project's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fastgen.kernels import elementwise
from fastgen.kernels.chunk import ChunkPlan, attend_chunk
from fastgen.kernels.decode import DecodeKernel, decode_kernel
from fastgen.model import checkpoint
from fastgen.model.architecture import ModelArchitecture
from fastgen.model.batch import Batch
from fastgen.model.checkpoint import Checkpoint, layer_tensor
from fastgen.model.linear import Linear, choose_linear
from fastgen.model.rope import Rope


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; projections that read the same rows are one product."""

    input_norm: np.ndarray  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv heads) * head_dim
    attention_output: Linear
    mlp_norm: np.ndarray  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear


class KVCache:
    """Keys and values of all layers, each [layers, blocks, kv heads, block size, head_dim] float32.

    Zeroed, so that slots nobody has written hold no NaN; the pages of memory are taken when first written.
    """

    def __init__(self, architecture: ModelArchitecture, num_blocks: int, block_size: int) -> None:
        shape = (architecture.num_layers, num_blocks, architecture.num_kv_heads, block_size, architecture.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)


class Llama:
    """Weights and their forward pass."""

    def __init__(self, architecture: ModelArchitecture, weights: Checkpoint, progress: Callable[[float], None]) -> None:
        """Loads and packs all weights; `progress` hears the share done, 0 to 1."""
        self._architecture = architecture
        self._scale = architecture.head_dim**-0.5
        self._rope = Rope(architecture, weights.rope_factors)
        self._embedding = weights.tensor(checkpoint.EMBEDDING)
        self._final_norm = weights.tensor(checkpoint.FINAL_NORM).numpy()
        first = _layer_matrices(weights, 0)
        head = self._embedding if architecture.tie_word_embeddings else weights.tensor(checkpoint.HEAD)
        linear = choose_linear([*first, head])
        self._head = linear(head)
        self._layers = []
        for index in range(architecture.num_layers):
            progress(index / architecture.num_layers)
            matrices = first if index == 0 else _layer_matrices(weights, index)
            qkv, attention_output, gate_up, down = map(linear, matrices)
            self._layers.append(
                Layer(
                    input_norm=weights.tensor(layer_tensor(index, "input_layernorm")).numpy(),
                    qkv=qkv,
                    attention_output=attention_output,
                    mlp_norm=weights.tensor(layer_tensor(index, "post_attention_layernorm")).numpy(),
                    gate_up=gate_up,
                    down=down,
                )
            )
        progress(1.0)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Computes a pass: writes its keys and values to the cache, returns logits [S, vocabulary] of sampled rows."""
        work = _Workspace(self._architecture, batch, cache, self._rope, self._scale)
        epsilon = np.float32(self._architecture.rms_norm_eps)
        x = self._embedding.index_select(0, torch.from_numpy(batch.token_ids))
        residual = x.numpy()
        normed = torch.empty_like(x)
        activated = torch.empty(batch.num_rows, self._architecture.intermediate_size)
        update = torch.zeros_like(x)
        for index, layer in enumerate(self._layers):
            elementwise.add_rms_norm(residual, update.numpy(), layer.input_norm, epsilon, normed.numpy())
            attended = work.attend(index, layer.qkv(normed))
            update = layer.attention_output(attended)
            elementwise.add_rms_norm(residual, update.numpy(), layer.mlp_norm, epsilon, normed.numpy())
            elementwise.silu_multiply(layer.gate_up(normed).numpy(), activated.numpy())
            update = layer.down(activated)
        rows = torch.from_numpy(batch.sample_rows)
        if not len(rows):
            return torch.empty(0, self._architecture.vocab_size)
        last, last_update = x.index_select(0, rows), update.index_select(0, rows)
        final = torch.empty_like(last)
        elementwise.add_rms_norm(last.numpy(), last_update.numpy(), self._final_norm, epsilon, final.numpy())
        return self._head(final)


class _Workspace:
    """What all layers' attention shares within one pass."""

    def __init__(self, architecture: ModelArchitecture, batch: Batch, cache: KVCache, rope: Rope, scale: float) -> None:
        a = architecture
        self._batch = batch
        self._cache = cache
        self._scale = scale
        self._kernel: DecodeKernel = decode_kernel(a.head_dim, a.heads_per_kv_head, cache.keys.shape[3])
        cosines, sines = rope(torch.from_numpy(batch.positions))
        self._cosines, self._sines = cosines.numpy(), sines.numpy()
        self._queries = torch.empty(batch.num_rows, a.num_heads, a.head_dim)
        self._out = torch.empty(batch.num_rows, a.num_heads, a.head_dim)
        self._parts = np.empty((max(1, batch.num_parts), a.heads_per_kv_head, a.head_dim + 2), np.float32)
        self._chunks = [
            ChunkPlan.make(span.row, span.num_tokens, span.context, torch.from_numpy(span.blocks))
            for span in batch.chunks
        ]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of one layer for all rows: [T, (heads + 2 kv heads) * head_dim] -> [T, heads * head_dim]."""
        batch, keys, values = self._batch, self._cache.keys[layer], self._cache.values[layer]
        queries, out = self._queries.numpy(), self._out.numpy()
        elementwise.rotate_and_store(
            qkv.numpy(), self._cosines, self._sines, keys.numpy(), values.numpy(), batch.blocks, batch.slots, queries
        )
        if len(batch.items):
            self._kernel(
                queries,
                keys.numpy(),
                values.numpy(),
                batch.tables,
                batch.items,
                batch.merges,
                self._parts,
                out,
                np.float32(self._scale),
            )
        for plan in self._chunks:
            attend_chunk(plan, self._queries, keys, values, self._out, self._scale)
        return self._out.flatten(1)


def _layer_matrices(weights: Checkpoint, layer: int) -> list[torch.Tensor]:
    """Fused qkv, attention output, fused gate and up, down."""

    def fused(*parts: str) -> torch.Tensor:
        return torch.cat([weights.tensor(layer_tensor(layer, part)) for part in parts])

    return [
        fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        fused("self_attn.o_proj"),
        fused("mlp.gate_proj", "mlp.up_proj"),
        fused("mlp.down_proj"),
    ]
