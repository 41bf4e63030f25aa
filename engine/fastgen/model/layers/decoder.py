"""Forward pass of a decoder over a paged KV cache, written once for all families and devices.

A step mixes decodes and prompt chunks; its rows are all its tokens. Some backends add padding rows.
"""

from __future__ import annotations

from typing import Generic

import torch
import torch.nn.functional as F

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.cache_shape import cache_shape
from fastgen.model.layers.backend import Backend, Input, Operations
from fastgen.model.layers.divided_norm import normalise_over_ranks
from fastgen.model.layers.moe import gated
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup
from fastgen.model.layers.weights import MLP, DecoderWeights, Layer, Mixture, MLPAndMixture


class Decoder(Generic[Input]):
    """A native model; implements `fastgen.runner.runner.Model` for the input of its backend.

    Attributes:
        architecture: description of the model, or of a rank's part of it.
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
        group: RankGroup = ONE_RANK,
    ) -> None:
        a = weights.architecture
        self.architecture = a
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.kv_shape = cache_shape(a, self.cache_dtype.itemsize)
        self._weights = weights
        self._backend = backend
        self._group = group

    def forward(self, forward_input: Input, cache: KVCache) -> torch.Tensor:
        """Compute a step and return the last hidden states [R, hidden] of its `logit_rows`.

        The step's keys and values are written to the cache.
        """
        weights = self._weights
        operations = self._backend(forward_input, cache)
        stream = operations.embed(weights.embedding, self.architecture.embedding_scale)
        inputs = self._layer_inputs(stream, operations)
        update, update_norm = None, None  # output of the last block, which the next add_norm adds to the stream
        for index, layer in enumerate(weights.layers):
            normed = operations.add_norm(stream, update, update_norm, layer.input_norm)
            attended = self._attended(index, layer, normed, operations)
            own_input = inputs[index] if inputs else None
            if index == len(weights.layers) - 1:
                # Beyond its keys and values, the last layer is needed only for the logit rows.
                attended, stream = operations.select_logit_rows(attended), operations.select_logit_rows(stream)
                own_input = None if own_input is None else operations.select_logit_rows(own_input)
            update = self._summed(layer.attention_output(attended))
            normed = operations.add_norm(stream, update, layer.attention_output_norm, layer.mlp_norm)
            if isinstance(layer.mlp, MLPAndMixture):
                update = self._both(layer.mlp, normed, stream, operations)
            else:
                update = self._summed(_mlp(layer.mlp, normed, operations))
            update_norm = layer.mlp_output_norm
            if layer.embedding is not None and own_input is not None:
                x = operations.add_norm(stream, update, update_norm, None)
                gated_input = operations.activate(torch.cat((layer.embedding.gate(x), own_input), 1))
                update, update_norm = layer.embedding.output(gated_input), layer.embedding.output_norm
            if layer.scale is not None:
                operations.add_norm(stream, update, update_norm, None)
                update, update_norm = None, None
                stream.mul_(layer.scale)
        return operations.add_norm(stream, update, update_norm, weights.final_norm)

    def _layer_inputs(self, stream: torch.Tensor, operations: Operations) -> tuple[torch.Tensor, ...] | None:
        """Return each layer's embeddings of the step's tokens [T, size], if the family has any.

        They are looked up, and added to a projection of the residual stream's first state.
        """
        weights, embeddings = self._weights.layer_embeddings, self.architecture.layer_embeddings
        if weights is None or embeddings is None:
            return None
        size = embeddings.size
        # The projection comes first: the results of `add_norm` and `embed` may be overwritten by their next calls.
        projected = weights.projection(operations.add_norm(stream, None, None, None))
        projected = (projected * self.architecture.hidden_size**-0.5).view(len(projected), -1, size)
        found = operations.embed(weights.table, size**0.5).view(projected.shape)
        inputs = ((self._normed(projected, weights.norm) + found) * 0.5**0.5).to(projected.dtype)
        return torch.unbind(inputs, 1)

    def _both(self, both: MLPAndMixture, x: torch.Tensor, stream: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the sum of an MLP of x and a mixture of the stream, each summed over the ranks and normalised."""
        dense = self._group.all_reduce(gated(both.mlp, x, operations.activate))
        dense = self._normed(dense, both.mlp_output_norm)
        mixed = operations.mixture(both.mixture, operations.add_norm(stream, None, None, both.unit_norm))
        return dense + self._normed(self._group.all_reduce(mixed), both.mixture_output_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the RMS norm over the last dimension, times `weight` if there is one."""
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.architecture.rms_norm_eps).to(x.dtype)

    def _attended(self, index: int, layer: Layer, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        if layer.qkv is None:
            assert layer.delta is not None
            return operations.attend_linearly(index, layer.delta.qkvz(x), layer.delta.ba(x), layer.delta.weights)
        qkv = layer.qkv(x)
        if self.architecture.value_norm and self.architecture.layers[index].kv_layer is None:
            heads = self.architecture.heads_of(index)
            values = qkv[:, -heads.num_kv_heads * heads.head_dim :].view(len(qkv), -1, heads.head_dim)
            values.copy_(self._normed(values, None))
        attended = operations.attend(index, *self._projected(layer, qkv), layer.sinks)
        return attended if layer.gate is None else attended.mul_(layer.gate(x).sigmoid_())

    def _projected(
        self, layer: Layer, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return queries, keys and values, and the norms that are still to be applied to each rank's heads."""
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if self._group.size == 1 or self.architecture.qk_norm != "whole" or query_norm is None or key_norm is None:
            return qkv, query_norm, key_norm
        return normalise_over_ranks(qkv, query_norm, key_norm, self.architecture.rms_norm_eps, self._group), None, None

    def _summed(self, update: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' outputs of a block, times the family's factor of residuals (Granite), in place."""
        update, scale = self._group.all_reduce(update), self.architecture.residual_scale
        return update if scale == 1 else update.mul_(scale)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [R, hidden] to logits [R, vocabulary] in float32."""
        if not len(hidden):
            return torch.empty(0, self.architecture.vocab_size, device=self.device)
        logits = self._weights.head(hidden)
        if self.architecture.logit_scale != 1:
            logits = logits.mul_(self.architecture.logit_scale)
        cap = self.architecture.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)  # bounded to ± cap (Gemma 2)


def _mlp(mlp: MLP | Mixture, x: torch.Tensor, operations: Operations) -> torch.Tensor:
    if isinstance(mlp, Mixture):
        return operations.mixture(mlp, x)
    return gated(mlp, x, operations.activate)
