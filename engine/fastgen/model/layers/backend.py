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
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Add `update` to `stream`, both [n, hidden], in place.

        Return the stream's RMS norm times `weight`. With `update_weight`, the update is normalised before it is added.
        `update` may be overwritten.
        """

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalise heads, rotate queries and keys, store keys and values in the cache, and attend.

        Args:
            layer: index of the layer.
            qkv: [T, (heads + 2 * kv heads) * head_dim], may be overwritten.
            query_norm, key_norm: [head_dim], or both None for no norm.

        Returns:
            [T, heads * head_dim].
        """

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up [n, width] for [n, 2 * width] with the gate first."""

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """Compute a mixture of experts: [n, hidden] -> [n, hidden]."""

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input's `logit_rows` of x [T, width]: [R, width]."""


Input = TypeVar("Input")

# Returns the operations of a step on one device, given the step's input in that device's form.
Backend = Callable[[Input, KVCache], Operations]
