"""Operations of a forward pass on a GPU. Each calls operators of `fastgen.kernels.gpu`, with few kernel launches.

On a CPU the operators run their readable twins, so the same code path is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastgen.kernels.gpu.attention import paged_attention
from fastgen.kernels.gpu.attention_tiles import workspace_elements
from fastgen.kernels.gpu.elementwise import add_rms_norm, gated_activation
from fastgen.kernels.gpu.embedding import embed
from fastgen.kernels.gpu.experts import experts, route_experts
from fastgen.kernels.gpu.rotary_cache import rotary_cache
from fastgen.kernels.gpu.work_list import list_attention_work
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.checkpoint.kv_scales import KVScales
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers.backend import Operations
from fastgen.model.layers.moe import shared_expert
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.torch_backend import DeviceTable, TorchFormat
from fastgen.model.layers.weights import Mixture


class GPUFormat(TorchFormat):
    """Matrices for cuBLAS and for the kernel of expert mixtures."""

    def experts(self, mlps: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate_up [E, 2 * width, hidden] with the gate first, and down [E, hidden, width]."""
        self.wait()
        return torch.stack([mlp.gate_up.weight for mlp in mlps]), torch.stack([mlp.down.weight for mlp in mlps])


class GPUBackend:
    """The backend for one GPU; see `backend.Backend`.

    Args:
        ropes: one for each of the architecture's RoPE configurations.
        max_positions: longest sequence; cosines and sines are computed for it once.
        kv_scales: of a float8 cache, for each layer; None for scales of 1.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        ropes: Sequence[Rope],
        max_positions: int,
        device: torch.device,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        self.architecture = architecture
        self.kv_scales = kv_scales or (KVScales(),) * architecture.num_layers
        positions = torch.arange(max_positions, device=device)
        self.rotations = [tuple(part.contiguous() for part in rope(positions)) for rope in ropes]
        elements = workspace_elements(architecture.num_kv_heads, architecture.head_dim, device)
        self.workspace = torch.zeros(elements, device=device)

    def __call__(self, forward_input: DeviceInput, cache: KVCache) -> Operations:
        """Return the operations of a step."""
        return _GPUOperations(self, forward_input, cache)


class _GPUOperations(Operations):
    """Operations of one step; see `backend.Operations`."""

    def __init__(self, backend: GPUBackend, forward_input: DeviceInput, cache: KVCache) -> None:
        self._backend = backend
        self._architecture = backend.architecture
        self._input = forward_input
        self._cache = cache
        self._work: dict[int, torch.Tensor] = {}  # list of the step's attention, by window

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        assert isinstance(table, DeviceTable)
        step = self._input
        return embed(table.matrix, step.token_ids, step.last_ids, step.source_rows, scale)

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        return add_rms_norm(stream, update, update_weight, weight, self._architecture.rms_norm_eps)

    def attend(
        self, layer: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        a, step = self._architecture, self._input
        kind, keys, values = a.layers[layer], self._cache.keys[layer], self._cache.values[layer]
        cosines, sines = self._backend.rotations[kind.rope]
        scales = self._backend.kv_scales[layer]
        rotary_cache(
            qkv, query_norm, key_norm, cosines, sines, step.positions, step.slot_mapping, keys, values, a.num_heads,
            a.rms_norm_eps, key_scale=scales.key, value_scale=scales.value,
        )  # fmt: skip
        queries = qkv.view(len(qkv), -1, a.head_dim)[:, : a.num_heads]
        out, window = qkv.new_empty(len(qkv), a.num_heads, a.head_dim), kind.window or 0
        if window not in self._work:
            self._work[window] = list_attention_work(queries, keys, step.query_starts, step.seq_lens, window)
        paged_attention(
            out, queries, keys, values, step.query_starts, step.seq_lens, step.block_tables, self._work[window],
            self._backend.workspace, scale=a.attention_scale, window=window, softcap=a.attention_softcap or 0.0,
            key_scale=scales.key, value_scale=scales.value,
        )  # fmt: skip
        return out.flatten(1)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_activation(gate_up, self._architecture.activation)

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        # Nothing here waits for the device: the number of rows of each expert stays there.
        weights, ids = route_experts(mixture.router(x), mixture.shape.top_k, mixture.shape.normalised)
        gate_up, down = mixture.experts
        out = experts(x, gate_up, down, weights, ids, self._architecture.activation)
        return out if mixture.shared is None else out.add_(shared_expert(mixture.shared, x, self.activate))

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._input.logit_rows)
