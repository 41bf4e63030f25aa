"""Interface of the operations of a forward pass, so that the decoder is written once for all devices.

An `Operations` object lives for one step: it holds the step's input and what all layers share. T is the number of rows:
the step's tokens, and padding if the backend adds any. Matrix products are not included, except those of a mixture's
experts on GPUs: other weights implement their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.layers.linear_attention import DeltaWeights
from fastgen.model.layers.weights import Mixture


class Operations(Protocol):
    """The operations of one step. A result may be overwritten by the next call of the same method."""

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        """Look up the embeddings of the step's tokens, times `scale`: [T, hidden], the residual stream."""

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add `update` to `stream`, both [n, hidden], in place.

        Return the stream's RMS norm times `weight`, or the stream itself without a weight, in the type of activations.
        With `update_weight`, the update is normalised before it is added. `update` may be overwritten.
        """

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Normalise heads, rotate queries and keys, store keys and values in the cache, and attend.

        Args:
            layer: index of the layer.
            qkv: [T, (heads + 2 * kv heads) * head_dim], may be overwritten; only queries in a layer that attends to the
                keys and values of an earlier one.
            query_norm, key_norm: [head_dim], or [width of all heads] for a norm over them, or None for no norm.
            sinks: [heads] float32, a score without a value in the softmax of each head, or None.

        Returns:
            [T, heads * head_dim].
        """

    def attend_linearly(self, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        """Compute the linear attention of a layer; see `LinearAttention.attend`."""

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up [n, width] for [n, 2 * width] with the gate first."""

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """Compute a mixture of experts: [n, hidden] -> [n, hidden]."""

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input's `logit_rows` of x [T, width]: [R, width]."""


Input = TypeVar("Input")

# Returns the operations of a step on one device, given the step's input in that device's form.
Backend = Callable[[Input, KVCache], Operations]
