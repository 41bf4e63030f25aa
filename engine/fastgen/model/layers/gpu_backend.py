"""Operations of a forward pass on a GPU. Each calls operators of `fastgen.kernels.gpu`, with few kernel launches.

On a CPU the operators run their readable twins, so the same code path is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastgen.kernels.gpu.attention import paged_attention
from fastgen.kernels.gpu.attention_tiles import workspace_elements
from fastgen.kernels.gpu.elementwise import add_rms_norm, gated_activation
from fastgen.kernels.gpu.embedding import embed
from fastgen.kernels.gpu.experts import experts, route_experts
from fastgen.kernels.gpu.rotary_cache import rotary_cache
from fastgen.kernels.gpu.work_list import list_attention_work
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, StoredTensor
from fastgen.model.checkpoint.kv_scales import KVScales
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers.backend import Operations
from fastgen.model.layers.float8_linear import Float8Linear, float8_rows
from fastgen.model.layers.int4_linear import Int4Linear, int4_rows
from fastgen.model.layers.linear import BiasedLinear, Linear, PlainLinear
from fastgen.model.layers.linear_attention import DeltaWeights
from fastgen.model.layers.moe import route, shared_expert
from fastgen.model.layers.rope import Rope, query_scales
from fastgen.model.layers.torch_backend import DeviceTable, TorchFormat
from fastgen.model.layers.vocabulary import DividedTable
from fastgen.model.layers.weights import Mixture


class StackedExperts(NamedTuple):
    """The experts of a mixture for `kernels.gpu.experts.experts`. Biases are float32, or None."""

    gate_up: torch.Tensor  # [E, 2 * width, hidden], the gate first
    gate_up_biases: torch.Tensor | None  # [E, 2 * width]
    down: torch.Tensor  # [E, hidden, width]
    down_biases: torch.Tensor | None  # [E, hidden]


class GPUFormat(TorchFormat):
    """Matrices for cuBLAS and for the kernel of expert mixtures.

    Weights stay in float8 where the GPU multiplies it, and stay 4-bit integers; other weights are in `dtype`.
    """

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the product in the checkpoint's format where there is one, otherwise torch's."""
        if (float8 := float8_rows(parts, self._device, self._dtype)) is not None:
            scales = torch.cat([part.scales() for part in float8])
            return Float8Linear(self._matrix(float8, torch.float8_e4m3fn), scales.to(self._device))
        if (int4 := int4_rows(parts, self._dtype)) is not None:
            scales, offsets = map(torch.cat, zip(*(part.scales() for part in int4), strict=True))
            order = None if int4[0].order is None else int4[0].order.to(self._device)
            packed = self._matrix(int4, torch.uint8)
            return Int4Linear(packed, scales.to(self._device), offsets.to(self._device), order)
        return super().linear(parts)

    def exact(self, part: StoredTensor) -> Linear:
        """Return torch's product."""
        return super().linear([part])

    def experts(self, mlps: tuple[Any, ...]) -> StackedExperts:
        """Return the experts, dequantised."""
        self.wait()
        gate_ups, downs = [mlp.gate_up for mlp in mlps], [mlp.down for mlp in mlps]
        return StackedExperts(*self._stacked(gate_ups), *self._stacked(downs))

    def _stacked(self, products: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weights of products, and their biases if they have them."""
        if isinstance(products[0], BiasedLinear):
            biases = torch.stack([product.bias for product in products])
            return self._stacked([product.product for product in products])[0], biases
        return torch.stack([self._plain(product) for product in products]), None

    def _plain(self, product: PlainLinear | Float8Linear | Int4Linear) -> torch.Tensor:
        return product.weight if isinstance(product, PlainLinear) else product.dequantised(self._dtype)


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
        scaling = architecture.query_scaling
        self.query_scales = None if scaling is None else query_scales(scaling, positions)
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
        scales = backend.query_scales
        self._query_scales = None if scales is None else scales.index_select(0, forward_input.positions)

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        step = self._input
        if isinstance(table, DividedTable):
            last, own = step.last_ids.index_select(0, step.source_rows), table.table
            ids = torch.where(step.token_ids < 0, last, step.token_ids)
            return table.look_up(ids, lambda index: self._embedded(own, index, scale))
        return self._embedded(table, step.token_ids, scale)

    def _embedded(self, table: EmbeddingTable, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        assert isinstance(table, DeviceTable)
        return embed(table.matrix, token_ids, self._input.last_ids, self._input.source_rows, scale)

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        eps = self._architecture.rms_norm_eps
        if weight is not None:
            return add_rms_norm(stream, update, update_weight, weight, eps)
        if update is not None:
            stream += update if update_weight is None else add_rms_norm(update, None, None, update_weight, eps)
        return stream

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        a, step = self._architecture, self._input
        kind, keys, values = a.layers[layer], self._cache.keys[layer], self._cache.values[layer]
        cosines, sines = self._backend.rotations[kind.rope]
        scales = self._backend.kv_scales[layer]
        if a.qk_norm == "whole" and query_norm is not None and key_norm is not None:
            self._norm_whole(qkv, query_norm, key_norm)
            query_norm = key_norm = None
        if self._query_scales is not None and kind.scales_queries:
            qkv[:, : a.num_heads * a.head_dim].mul_(self._query_scales)
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
            self._backend.workspace, scale=a.attention_scale, sinks=sinks, window=window,
            softcap=a.attention_softcap or 0.0, key_scale=scales.key, value_scale=scales.value,
        )  # fmt: skip
        return out.flatten(1)

    def _norm_whole(self, qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor) -> None:
        """Normalise the queries of all heads together, and the keys, in place."""
        parts = qkv.split([len(query_norm), len(key_norm), len(key_norm)], 1)  # type: ignore[no-untyped-call]
        for part, norm in zip(parts, (query_norm, key_norm), strict=False):
            part.copy_(add_rms_norm(part.contiguous(), None, None, norm, self._architecture.rms_norm_eps))

    def attend_linearly(self, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        raise NotImplementedError("has_gpu_operators leaves models with linear attention to other backends")

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_activation(gate_up, self._architecture.activation)

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        # Nothing here waits for the device: the number of rows of each expert stays there.
        if mixture.shape.sigmoid is None:
            weights, ids = route_experts(mixture.router(x), mixture.shape.top_k, mixture.shape.normalised)
        else:
            weights, chosen = route(mixture, x)
            ids = chosen.int()
        if len(mixture.own) < mixture.shape.count:  # experts of other ranks have ids below 0
            ids = ids - mixture.own.start
            ids.masked_fill_(ids >= len(mixture.own), -1)
        own, activation = mixture.experts, self._architecture.activation
        out = experts(x, own.gate_up, own.down, weights, ids, activation, own.gate_up_biases, own.down_biases)
        return out if mixture.shared is None else out.add_(shared_expert(mixture.shared, x, self.activate))

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._input.logit_rows)
