"""Which part of a native model each rank of a group holds.

A rank computes a decoder with fewer heads, narrower MLPs and some of the experts. Its tensors are rows or columns of
the model's. The sum of the ranks' results is the output of an attention block or an MLP (Shoeybi et al., 2019).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fastgen.model.checkpoint.checkpoint import Checkpoint, Part, StoredTensor
from fastgen.model.checkpoint.safetensors import FloatTensor
from fastgen.model.config.architecture import EMBEDDING, HEAD, Experts, LayerKind, ModelArchitecture
from fastgen.settings import ConfigError


@dataclass(frozen=True, slots=True)
class _Division:
    """How a tensor is divided: along its rows or its columns, and which of them a rank holds."""

    along: Literal["rows", "columns"]
    unit: Literal[
        "heads",
        "kv heads",
        "sinks",
        "linear keys",
        "linear values",
        "linear heads",
        "mlp",
        "shared expert",
        "vocabulary",
    ]


# Tensors that are not listed are the same on all ranks, except that a rank reads only its own experts.
_DIVIDED = {
    "self_attn.q_proj": _Division("rows", "heads"),
    "self_attn.k_proj": _Division("rows", "kv heads"),
    "self_attn.v_proj": _Division("rows", "kv heads"),
    "self_attn.o_proj": _Division("columns", "heads"),
    "self_attn.sinks": _Division("rows", "sinks"),
    # Of models that normalise all heads together.
    "self_attn.q_norm": _Division("rows", "heads"),
    "self_attn.k_norm": _Division("rows", "kv heads"),
    "self_attn.gate_proj": _Division("rows", "heads"),
    **{f"linear_attn.{name}": _Division("rows", "linear keys") for name in ("in_proj_q", "in_proj_k")},
    **{f"linear_attn.{name}": _Division("rows", "linear keys") for name in ("q_conv1d", "k_conv1d")},
    **{f"linear_attn.{name}": _Division("rows", "linear values") for name in ("in_proj_v", "in_proj_z", "v_conv1d")},
    **{f"linear_attn.{name}": _Division("rows", "linear heads") for name in ("in_proj_b", "in_proj_a")},
    **{f"linear_attn.{name}": _Division("rows", "linear heads") for name in ("A_log", "dt_bias")},
    "linear_attn.out_proj": _Division("columns", "linear values"),
    "mlp.gate_proj": _Division("rows", "mlp"),
    "mlp.up_proj": _Division("rows", "mlp"),
    "mlp.down_proj": _Division("columns", "mlp"),
    "mlp.shared_expert.gate_proj": _Division("rows", "shared expert"),
    "mlp.shared_expert.up_proj": _Division("rows", "shared expert"),
    "mlp.shared_expert.down_proj": _Division("columns", "shared expert"),
}
_NORMS_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.weight|\.bias)?")


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of one rank.

    Attributes:
        rank, size: number of the rank, and of ranks.
        block: columns of MLPs are divided at its multiples.
    """

    rank: int = 0
    size: int = 1
    block: int = 1

    @classmethod
    def of(cls, architecture: ModelArchitecture, source: Checkpoint, rank: int, size: int, block: int) -> Partition:
        """Return the partition of a model whose matrices are kept in blocks of `block` columns.

        Raises:
            ConfigError: if the model cannot be divided among so many ranks.
        """
        if size > 1:
            check_divisible(architecture, size)
            names = [name for name in architecture.tensor_shapes() if name.endswith("down_proj.weight")]
            block = max([block, *(source.stored(name).block for name in names)])
            widths = [width for layer in architecture.layers for width in _widths(architecture, layer)]
            narrowest = min(widths, default=block * size)
            if narrowest <= block * (size - 1):
                raise ConfigError(
                    f"--tensor-parallel {size}: the model's MLPs of {narrowest} columns have too few blocks of {block} "
                    "for so many ranks: lower it"
                )
        return cls(rank, size, block)

    def share(self, count: int, block: int = 1) -> range:
        """Return the rank's share of `count` things: whole blocks, in numbers that differ by at most one."""
        blocks = -(-count // block)
        first, end = (blocks * rank // self.size * block for rank in (self.rank, self.rank + 1))
        return range(first, min(end, count))

    def widths(self, count: int) -> list[int]:
        """Return the size of each rank's share of `count` things."""
        return [len(replace(self, rank=rank).share(count)) for rank in range(self.size)]

    def architecture(self, whole: ModelArchitecture) -> ModelArchitecture:
        """Return the decoder of the rank. Its vocabulary and its number of experts are those of the model."""
        return replace(
            whole,
            num_heads=len(self._heads(whole)),
            num_kv_heads=len(self._shared(whole.num_kv_heads)),
            mlp_size=len(self.share(whole.mlp_size, self.block)),
            layers=tuple(map(self._layer, whole.layers)),
        )

    def checkpoint(self, source: Checkpoint, whole: ModelArchitecture) -> Checkpoint:
        """Return a checkpoint whose tensors are the rank's parts of those in `source`."""
        if self.size == 1:
            return source

        def stored(name: str) -> StoredTensor:
            tensor, division = source.stored(name), division_of(name, whole)
            if division is None:
                return tensor
            if division.along == "columns" and name.endswith("bias"):
                # It is added to the sum of the ranks' results, so once.
                return tensor if self.rank == 0 else FloatTensor(lambda: torch.zeros(tensor.shape), tensor.shape)
            span = self._span(division, whole, name)
            return tensor.part(Part(rows=span) if division.along == "rows" else Part(columns=span))

        return replace(source, stored=stored)

    def _span(self, division: _Division, whole: ModelArchitecture, name: str) -> range:
        """Return the rows or columns of a tensor that the rank holds."""
        if division.unit == "vocabulary":
            return self.share(whole.vocab_size)
        found = _LAYER_TENSOR.fullmatch(name)
        assert found is not None
        layer = whole.layers[int(found[1])]
        heads = layer.heads or whole.heads
        match division.unit:
            case "heads":
                return _scaled(self._heads(whole), heads.head_dim)
            case "kv heads":
                return _scaled(self._shared(heads.num_kv_heads), heads.head_dim)
            case "sinks":
                return self._heads(whole)
            case "mlp":
                return self.share(layer.mlp_size or whole.mlp_size, self.block)
            case "shared expert":
                assert layer.experts is not None
                return self.share(layer.experts.shared_intermediate_size, self.block)
        assert layer.delta is not None
        match division.unit:
            case "linear keys":
                return _scaled(self._shared(layer.delta.key_heads), layer.delta.key_dim)
            case "linear values":
                return _scaled(self.share(layer.delta.value_heads), layer.delta.value_dim)
            case "linear heads":
                return self.share(layer.delta.value_heads)

    def _heads(self, whole: ModelArchitecture) -> range:
        return self.share(whole.num_heads)

    def _shared(self, count: int) -> range:
        """Return the rank's part of `count` heads that others share: the key-value heads of its queries.

        Several ranks hold the same if there are more ranks.
        """
        first = self.rank * count // self.size
        return range(first, first + max(1, count // self.size))

    def _layer(self, layer: LayerKind) -> LayerKind:
        heads, delta = layer.heads, layer.delta
        if heads is not None:
            heads = replace(heads, num_kv_heads=len(self._shared(heads.num_kv_heads)))
        if delta is not None:
            key_heads, value_heads = len(self._shared(delta.key_heads)), len(self.share(delta.value_heads))
            delta = replace(delta, key_heads=key_heads, value_heads=value_heads)
        mlp_size = None if layer.mlp_size is None else len(self.share(layer.mlp_size, self.block))
        return replace(layer, heads=heads, delta=delta, mlp_size=mlp_size, experts=self._experts(layer.experts))

    def _experts(self, experts: Experts | None) -> Experts | None:
        if experts is None:
            return None
        return replace(experts, shared_intermediate_size=len(self.share(experts.shared_intermediate_size, self.block)))


UNDIVIDED = Partition()


def division_of(name: str, whole: ModelArchitecture) -> _Division | None:
    """Return how a tensor of a model's `tensor_shapes` is divided; None if it is not."""
    if name in (EMBEDDING, HEAD):
        return _Division("rows", "vocabulary")
    found = _LAYER_TENSOR.fullmatch(name)
    if found is None or (found[2] in _NORMS_OF_HEADS and whole.qk_norm != "whole"):
        return None
    return _DIVIDED.get(found[2])


def check_divisible(architecture: ModelArchitecture, size: int) -> None:
    """Raise ConfigError if the heads or experts of a model cannot be divided among so many ranks."""
    heads, delta = architecture.num_heads, architecture.delta
    sharing = [each.num_kv_heads for each in (architecture.heads, architecture.other_heads) if each is not None]
    what = f"{heads} attention heads and {' or '.join(map(str, sharing))} key-value heads"
    _check_heads([(heads, each) for each in sharing], size, what)
    if delta is not None:
        what = f"{delta.value_heads} value heads and {delta.key_heads} key heads of linear attention"
        _check_heads([(delta.value_heads, delta.key_heads)], size, what)
    for layer in architecture.layers:
        if layer.experts is not None and layer.experts.count < size:
            raise ConfigError(f"--tensor-parallel {size}: the layers have only {layer.experts.count} experts: lower it")


def _check_heads(pairs: Sequence[tuple[int, int]], size: int, what: str) -> None:
    """Check pairs of numbers: of heads, and of those that share them."""

    def fits(size: int) -> bool:
        return all(not heads % size and not (sharing % size and size % sharing) for heads, sharing in pairs)

    if not fits(size):
        possible = ", ".join(str(each) for each in range(1, pairs[0][0] + 1) if fits(each))
        raise ConfigError(
            f"--tensor-parallel {size}: the model's {what} cannot be divided evenly: choose one of {possible}"
        )


def _widths(architecture: ModelArchitecture, layer: LayerKind) -> list[int]:
    """Return the widths of a layer's MLPs that are divided."""
    own = layer.mlp_size or architecture.mlp_size
    if layer.experts is None:
        return [own]
    shared = layer.experts.shared_intermediate_size
    return [*([shared] if shared else []), *([own] if layer.experts.beside_mlp else [])]


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
