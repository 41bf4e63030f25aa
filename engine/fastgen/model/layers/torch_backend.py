"""Operations with torch, on any device and in any floating type.

Also the reference implementation for tests of `cpu_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.elementwise import ACTIVATIONS
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, Readable, StoredTensor
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.linear import Linear, PlainLinear, WeightFormat, stacked
from fastgen.model.layers.linear_attention import DeltaWeights, linear_attention
from fastgen.model.layers.moe import mixture_of_experts
from fastgen.model.layers.rope import Rope, query_scales
from fastgen.model.layers.torch_attention import TorchPagedAttention
from fastgen.model.layers.weight_reader import PinnedCopier, WeightReader
from fastgen.model.layers.weights import Mixture


class DeviceTable:
    """An embedding matrix [vocabulary, hidden] on the device."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows."""
        return F.embedding(rows, self.matrix)


class TorchFormat(WeightFormat):
    """Matrices in `dtype` on `device`; norms and biases in float32. A tied embedding exists once.

    Args:
        reader: reads the matrices. By default, a GPU has one; for other devices, the caller's thread reads them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, reader: WeightReader | None = None) -> None:
        self._device = device
        self._dtype = dtype
        if reader is None and device.type == "cuda":
            reader = WeightReader(device, lambda: PinnedCopier(device))
        self._reader = reader
        self._head: tuple[StoredTensor, torch.Tensor] | None = None  # until the embedding, which it may be tied to

    def placing(self) -> AbstractContextManager[object]:
        """Return the context in which to place weights: at its end, all are in place."""
        return self._reader or nullcontext()

    def wait(self) -> None:
        """Wait until the weights so far are in place: the device must not compute with them before."""
        if self._reader is not None:
            self._reader.wait()

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return torch's product."""
        return PlainLinear(self._matrix(parts, self._dtype))

    def head(self, part: StoredTensor) -> Linear:
        """Return torch's product with float32 results."""
        matrix = self._matrix([part], self._dtype)
        self._head = (part, matrix)
        return TorchHead(matrix)

    def table(self, part: StoredTensor) -> EmbeddingTable:
        """Return the matrix on the device, which a tied head shares."""
        head, self._head = self._head, None
        return DeviceTable(head[1] if head is not None and head[0] is part else self._matrix([part], self._dtype))

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights on the device, in float32."""
        return weight.to(self._device, torch.float32)

    def _matrix(self, parts: Sequence[Readable], dtype: torch.dtype) -> torch.Tensor:
        return stacked(parts, dtype) if self._reader is None else self._reader.read(parts, dtype)


class TorchOperations:
    """Operations of one step; see `backend.Operations`. There is a `Rope` for each configuration of the model."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        ropes: Sequence[Rope],
        device: torch.device,
        forward_input: ForwardInput,
        cache: KVCache,
    ) -> None:
        self._architecture = architecture
        self._places = architecture.places_of(by_window=cache.windowed is not None)
        self._linear_attention = linear_attention(architecture, forward_input, cache, device)
        windowed, window_cache = cache.of_windows(forward_input, forward_input.windowed)
        places = {False: (forward_input, cache), True: (windowed, window_cache)}
        inputs: dict[tuple[int | None, bool], ForwardInput] = {}
        for chunk, is_windowed in {(layer.chunk, layer.is_windowed) for layer in architecture.layers}:
            found = places[is_windowed][0]
            inputs[chunk, is_windowed] = found if chunk is None else found.within_chunks(chunk, cache.block_size)
        caches = {
            (heads, is_windowed): part
            for is_windowed, (_, whole) in places.items()
            for heads, part in zip((None, architecture.other_heads), whole.by_heads, strict=False)
        }
        self._attention = {
            kind: TorchPagedAttention(inputs[kind[1:]], caches[kind[0], kind[2]], device)
            for kind in {(layer.heads, layer.chunk, layer.is_windowed) for layer in architecture.layers}
        }
        self._token_ids = torch.from_numpy(forward_input.token_ids).to(device)
        self._logit_rows = torch.from_numpy(forward_input.logit_rows).to(device)
        positions = torch.from_numpy(forward_input.positions).to(device)
        self._rotations = [rope(positions) for rope in ropes]
        scaling = architecture.query_scaling
        self._query_scales = None if scaling is None else query_scales(scaling, positions)

    def embed(self, table: EmbeddingTable, scale: float) -> torch.Tensor:
        """Look up the embeddings of the step's tokens."""
        # The scale has the table's dtype, as in transformers: in bfloat16 it is rounded.
        stream = table(self._token_ids)
        return stream * torch.tensor(scale, dtype=stream.dtype, device=stream.device)

    def add_norm(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        update_weight: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add in place and normalise."""
        if update is not None:
            stream += update if update_weight is None else self._norm(update, update_weight)
        return stream if weight is None else self._norm(stream, weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension, in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._architecture.rms_norm_eps)
        return (wide * scale * weight).to(x.dtype)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values, and attend."""
        a, kind = self._architecture, self._architecture.layers[layer]
        heads = qkv.view(len(qkv), -1, a.heads_of(layer).head_dim)
        attention = self._attention[kind.heads, kind.chunk, kind.is_windowed]
        queries, keys_and_values = torch.split(heads, [a.num_heads, heads.shape[1] - a.num_heads], 1)
        if query_norm is not None:
            queries = self._norm_of(queries, query_norm)
        if self._query_scales is not None and kind.scales_queries:
            queries = (queries * self._query_scales[:, None]).to(queries.dtype)
        cosines, sines = self._rotations[kind.rope]
        if kind.kv_layer is None:
            keys, values = keys_and_values.chunk(2, 1)
            if key_norm is not None:
                keys = self._norm_of(keys, key_norm)
            attention.store(self._places[layer], _rotated(keys, cosines, sines), values)
        attended = attention.attend(
            self._places[layer],
            _rotated(queries, cosines, sines),
            scale=a.attention_scale,
            window=kind.window,
            softcap=a.attention_softcap,
            sinks=sinks,
        )
        return attended.flatten(1)

    def _norm_of(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise heads [T, heads, head_dim], each or all together, as the size of the weight says."""
        return self._norm(heads.reshape(len(heads), -1, len(weight)), weight).view(heads.shape)

    def attend_linearly(self, layer: int, qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        """Compute linear attention."""
        assert self._linear_attention is not None
        return self._linear_attention.attend(self._places[layer], weights, qkvz, ba)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Combine the gate and the up projection."""
        return ACTIVATIONS[self._architecture.activation](gate_up)

    def mixture(self, mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
        """Compute each expert over its rows."""
        return mixture_of_experts(mixture, x, self.activate)

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Select the logit rows."""
        return x.index_select(0, self._logit_rows)


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * d dimensions of x [T, heads, head_dim] by cosines and sines [T, d] in float32."""
    size = 2 * cosines.shape[-1]
    a, b = x[..., :size].float().chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)
