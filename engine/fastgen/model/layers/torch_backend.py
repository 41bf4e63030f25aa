"""The operations of a pass in torch's own operations: any device, any floating type.

The readable twin of `cpu_operations`, too: tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.safetensors import Stored, Table
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.layers.linear import Linear, PlainLinear, stacked
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.torch_attention import TorchPagedAttention
from fastgen.model.step_input import StepInput


@dataclass(frozen=True, slots=True)
class TorchPlacement:
    """Weights on `device`, matrices in `dtype`; norms and biases stay float32: they are few, and their steps exact."""

    device: torch.device
    dtype: torch.dtype

    def linear(self, parts: Sequence[Stored]) -> Linear:
        """torch's own product."""
        return PlainLinear(stacked(parts).to(self.device, self.dtype))

    def exact(self, part: Stored) -> Linear:
        """torch's own product."""
        return self.linear([part])

    def table(self, part: Stored) -> Table:
        """The matrix over there."""
        matrix = part.float32().to(self.device, self.dtype)
        return lambda rows: F.embedding(rows, matrix)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """The weights over there, float32."""
        return weight.to(self.device, torch.float32)


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """One device.

    Attributes:
        architecture: of the model.
        ropes: one for each of the architecture's rotaries.
        device: where weights and cache are.
    """

    architecture: ModelArchitecture
    ropes: Sequence[Rope]
    device: torch.device

    def begin(self, batch: StepInput, cache: KVCache) -> TorchOperations:
        """The operations of a pass."""
        return TorchOperations(self, batch, cache)


class TorchOperations:
    """The steps of one pass; see `operations.Operations`."""

    def __init__(self, backend: TorchBackend, batch: StepInput, cache: KVCache) -> None:
        self._architecture = backend.architecture
        self._attention = TorchPagedAttention(batch, cache, backend.device)
        self._token_ids = torch.from_numpy(batch.token_ids).to(backend.device)
        self._wanted = torch.from_numpy(batch.logit_rows).to(backend.device)
        positions = torch.from_numpy(batch.positions).to(backend.device)
        self._turns = [rope(positions) for rope in backend.ropes]

    def embed(self, table: Table, scale: float) -> torch.Tensor:
        """The embeddings of the pass's tokens."""
        # The scale in the table's type, as transformers has it: in bfloat16 it is rounded.
        stream = table(self._token_ids)
        return stream * torch.tensor(scale, dtype=stream.dtype, device=stream.device)

    def add_norm(self, stream: torch.Tensor, update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds in place and normalises."""
        stream += update
        return self.norm(stream, weight)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension, computed in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._architecture.rms_norm_eps)
        return (wide * scale * weight).to(x.dtype)

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention with everything before it."""
        a, kind = self._architecture, self._architecture.layers[layer]
        heads = qkv.view(len(qkv), -1, a.head_dim)
        queries, keys, values = torch.split(heads, [a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
        if query_norm is not None and key_norm is not None:
            queries, keys = self.norm(queries, query_norm), self.norm(keys, key_norm)
        cosines, sines = self._turns[kind.rotary]
        self._attention.store(layer, _turned(keys, cosines, sines), values)
        attended = self._attention.attend(
            layer,
            _turned(queries, cosines, sines),
            scale=a.attention_scale,
            window=kind.window,
            softcap=a.attention_softcap,
        )
        return attended.flatten(1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of the gate times the rest."""
        gate, up = gate_up.chunk(2, -1)
        match self._architecture.activation:
            case "silu":
                return F.silu(gate) * up
            case "gelu_tanh":
                return F.gelu(gate, approximate="tanh") * up

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The rows whose logits are wanted."""
        return x.index_select(0, self._wanted)


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] with its first 2 * turning dimensions turned; cosines and sines [T, turning] float32."""
    size = 2 * cosines.shape[-1]
    a, b = x[..., :size].float().chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)
