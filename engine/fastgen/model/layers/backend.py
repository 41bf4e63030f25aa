"""What a decoder's forward pass is made of, so that it is written once for every device.

An `Operations` object lives for one pass: it knows the pass's rows, its place in the cache, and keeps what all layers
share. T is the number of rows (tokens) of the pass. Products are not among the operations: weights bring their own.
"""

from __future__ import annotations

from typing import Protocol

import torch

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.safetensors import Table
from fastgen.model.step_input import StepInput


class Operations(Protocol):
    """The steps of one pass. A result may be overwritten by the next call of the same method."""

    def embed(self, table: Table, scale: float) -> torch.Tensor:
        """Rows of `table`, each [hidden], for the pass's tokens, times `scale`: [T, hidden], the stream."""

    def add_norm(self, stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds `update` to `stream`, both [n, hidden], in place; returns the stream's RMS norm times `weight`."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The RMS norm of x [n, hidden] times `weight`; x may be overwritten."""

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Normalises heads where norms are given, turns queries and keys, stores keys and values, attends.

        Args:
            layer: which one.
            qkv: [T, (heads + 2 * kv heads) * head_dim], may be overwritten.
            query_norm, key_norm: [head_dim].

        Returns:
            [T, heads * head_dim].
        """

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up for [n, 2 * width] with the gate first: [n, width]."""

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, hidden] whose logits are wanted: [R, hidden]."""


class Backend(Protocol):
    """Makes the operations of each pass on one device."""

    def begin(self, batch: StepInput, cache: KVCache) -> Operations:
        """The operations of a pass."""
