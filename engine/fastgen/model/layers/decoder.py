"""Forward pass of a decoder over a paged KV cache, written once for all families and devices.

A step mixes decodes and prompt chunks; its rows are all its tokens. Some backends add padding rows.
"""

from __future__ import annotations

from typing import Generic

import torch

from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers.backend import Backend, Input, Operations
from fastgen.model.layers.moe import gated
from fastgen.model.layers.weights import MLP, DecoderWeights, Mixture


class Decoder(Generic[Input]):
    """A native model; implements `fastgen.runner.runner.Model` for the input of its backend.

    Attributes:
        architecture: description of the model.
        kv_shape: shape of one token's keys and values.
        device, dtype: of weights and activations.
        cache_dtype: of keys and values in the cache; `dtype` unless it is given.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        backend: Backend[Input],
        *,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        a = weights.architecture
        self.architecture = a
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.kv_shape = KVShape(
            a.num_layers,
            a.num_kv_heads,
            key_dim=a.head_dim,
            value_dim=a.head_dim,
            element_bytes=self.cache_dtype.itemsize,
        )
        self._weights = weights
        self._backend = backend

    def forward(self, forward_input: Input, cache: KVCache) -> torch.Tensor:
        """Compute a step and return the last hidden states [R, hidden] of its `logit_rows`.

        The step's keys and values are written to the cache.
        """
        weights = self._weights
        operations = self._backend(forward_input, cache)
        stream = operations.embed(weights.embedding, self.architecture.embedding_scale)
        update, update_norm = None, None  # output of the last block, which the next add_norm adds to the stream
        for index, layer in enumerate(weights.layers):
            normed = operations.add_norm(stream, update, update_norm, layer.input_norm)
            attended = operations.attend(index, layer.qkv(normed), layer.query_norm, layer.key_norm)
            if index == len(weights.layers) - 1:
                # Beyond its keys and values, the last layer is needed only for the logit rows.
                attended, stream = operations.select_logit_rows(attended), operations.select_logit_rows(stream)
            update = layer.attention_output(attended)
            normed = operations.add_norm(stream, update, layer.attention_output_norm, layer.mlp_norm)
            update, update_norm = _mlp(layer.mlp, normed, operations), layer.mlp_output_norm
        return operations.add_norm(stream, update, update_norm, weights.final_norm)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] to logits [R, vocabulary], in the type of the product, or in float32 if they are capped."""
        if not len(hidden):
            return torch.empty(0, self.architecture.vocab_size, device=self.device)
        logits = self._weights.head(hidden)
        cap = self.architecture.logit_softcap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)  # bounded to ± cap (Gemma 2)


def _mlp(mlp: MLP | Mixture, x: torch.Tensor, operations: Operations) -> torch.Tensor:
    if isinstance(mlp, Mixture):
        return operations.mixture(mlp, x)
    return gated(mlp, x, operations.activate)
