"""The forward pass of a decoder over a paged KV cache, written once for all families and devices.

A pass mixes decodes and prompt chunks; its rows are all its tokens, without padding.
"""

from __future__ import annotations

import torch

from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers.backend import Backend, Operations
from fastgen.model.layers.moe import gated, mixed
from fastgen.model.layers.weights import MLP, DecoderWeights, Mixture
from fastgen.model.step_input import StepInput


class Decoder:
    """The forward pass over given weights; a `runner.Model`.

    Attributes:
        architecture: the model's shape.
        kv_shape: what a token leaves in the cache.
        device, dtype: where it runs, and the type of activations and cache.
    """

    def __init__(self, weights: DecoderWeights, backend: Backend, *, device: torch.device, dtype: torch.dtype) -> None:
        a = weights.architecture
        self.architecture = a
        self.kv_shape = KVShape(
            a.num_layers, a.num_kv_heads, key_dim=a.head_dim, value_dim=a.head_dim, element_bytes=dtype.itemsize
        )
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self._backend = backend

    def forward(self, batch: StepInput, cache: KVCache) -> torch.Tensor:
        """Computes a pass: writes its keys and values to the cache, returns [R, hidden] of the rows with logits."""
        weights = self._weights
        operations = self._backend.begin(batch, cache)
        stream = operations.embed(weights.embedding, self.architecture.embedding_scale)
        update = torch.zeros_like(stream)  # what the last product adds to the stream, added by the next norm
        for index, layer in enumerate(weights.layers):
            normed = operations.add_norm(stream, update, layer.input_norm)
            attended = operations.attend(index, layer.qkv(normed), layer.query_norm, layer.key_norm)
            if index == len(weights.layers) - 1:
                # Behind its keys and values, the last layer matters only to rows with logits: a prompt has one.
                attended, stream = operations.wanted(attended), operations.wanted(stream)
            update = layer.attention_output(attended)
            if layer.behind_attention is not None:
                update = operations.norm(update, layer.behind_attention)
            normed = operations.add_norm(stream, update, layer.mlp_norm)
            update = _mlp(layer.mlp, normed, operations)
            if layer.behind_mlp is not None:
                update = operations.norm(update, layer.behind_mlp)
        return operations.add_norm(stream, update, weights.final_norm)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> logits [R, vocabulary] in float32."""
        if not len(hidden):
            return torch.empty(0, self.architecture.vocab_size, device=self.device)
        logits = self._weights.head(hidden).float()
        cap = self.architecture.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def _mlp(mlp: MLP | Mixture, x: torch.Tensor, operations: Operations) -> torch.Tensor:
    if isinstance(mlp, Mixture):
        return mixed(mlp, x, operations)
    return gated(mlp, x, operations)


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Squeezes between ± cap (Gemma 2), in place."""
    return logits.div_(cap).tanh_().mul_(cap)
