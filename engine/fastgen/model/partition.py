"""Which part of a native model each rank of a group holds.

A rank computes a decoder with fewer heads, narrower MLPs and some of the experts. Its tensors are rows or columns of
the model's. The sum of the ranks' results is the output of an attention block or an MLP (Shoeybi et al., 2019).
"""

from __future__ import annotations

import re
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
    unit: Literal["heads", "kv heads", "sinks", "mlp", "shared expert", "vocabulary"]


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
            num_kv_heads=len(self._kv_heads(whole)),
            mlp_size=len(self.share(whole.mlp_size, self.block)),
            layers=tuple(replace(layer, experts=self._experts(layer.experts)) for layer in whole.layers),
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
        match division.unit:
            case "heads":
                return _scaled(self._heads(whole), whole.head_dim)
            case "kv heads":
                return _scaled(self._kv_heads(whole), whole.head_dim)
            case "sinks":
                return self._heads(whole)
            case "mlp":
                return self.share(whole.mlp_size, self.block)
            case "shared expert":
                found = _LAYER_TENSOR.fullmatch(name)
                assert found is not None
                experts = whole.layers[int(found[1])].experts
                assert experts is not None
                return self.share(experts.shared_intermediate_size, self.block)
            case "vocabulary":
                return self.share(whole.vocab_size)

    def _heads(self, whole: ModelArchitecture) -> range:
        return self.share(whole.num_heads)

    def _kv_heads(self, whole: ModelArchitecture) -> range:
        """Return the key-value heads of the rank's queries. Several ranks hold the same if there are more ranks."""
        first = self.rank * whole.num_kv_heads // self.size
        return range(first, first + max(1, whole.num_kv_heads // self.size))

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
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    reasons = {
        "linear attention": architecture.delta is not None,
        "norms of values": architecture.value_norm,
    }
    for feature in (feature for feature, has_it in reasons.items() if has_it):
        raise ConfigError(
            f"--tensor-parallel {size}: not available for {architecture.name}, which has {feature}: remove it"
        )
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"--tensor-parallel {size}: the model's {heads} attention heads and {kv_heads} key-value heads cannot be "
            f"divided evenly: {_possible(heads, kv_heads)}"
        )
    for layer in architecture.layers:
        if layer.experts is not None and layer.experts.count < size:
            raise ConfigError(f"--tensor-parallel {size}: the layers have only {layer.experts.count} experts: lower it")


def _possible(heads: int, kv_heads: int) -> str:
    """Return which numbers of ranks are possible."""
    sizes = [size for size in range(1, heads + 1) if not heads % size and not (kv_heads % size and size % kv_heads)]
    return f"choose one of {', '.join(map(str, sizes))}"


def _widths(architecture: ModelArchitecture, layer: LayerKind) -> list[int]:
    """Return the widths of a layer's MLPs that are divided."""
    if layer.experts is None:
        return [architecture.mlp_size]
    shared = layer.experts.shared_intermediate_size
    return [shared] if shared else []


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
