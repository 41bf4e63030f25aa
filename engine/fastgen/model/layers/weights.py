"""Weights of a decoder, fused and packed for the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastgen.model.checkpoint.checkpoint import Checkpoint, EmbeddingTable
from fastgen.model.config.architecture import (
    EMBEDDING,
    FINAL_NORM,
    Experts,
    LayerKind,
    ModelArchitecture,
    layer_tensor,
)
from fastgen.model.layers.linear import BiasedLinear, Linear, WeightFormat


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP."""

    gate_up: Linear  # hidden -> 2 * intermediate, the gate first
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that processes every token, weighted by the sigmoid of its gate."""

    mlp: MLP
    gate: Linear  # hidden -> 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts."""

    shape: Experts
    router: Linear  # hidden -> experts
    experts: Any  # a tuple of `MLP`, or what the weight format made of it
    shared: SharedExpert | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Projections of the same input are one product. Norms are [hidden] float32.

    Attributes:
        qkv: hidden -> (heads + 2 * kv heads) * head_dim.
        query_norm, key_norm: [head_dim] float32, applied per head; None if the family has none.
        attention_output_norm, mlp_output_norm: norms of the blocks' outputs; None if the family has none.
    """

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: Linear
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: MLP | Mixture
    mlp_output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder."""

    architecture: ModelArchitecture
    embedding: EmbeddingTable  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor  # [hidden] float32
    head: Linear  # hidden -> vocabulary

    @classmethod
    def load(
        cls,
        architecture: ModelArchitecture,
        source: Checkpoint,
        weight_format: WeightFormat,
        progress: Callable[[float], None],
    ) -> DecoderWeights:
        """Read, fuse and place all weights; `progress` is called with the fraction done, 0 to 1."""
        progress(0.0)
        with weight_format.placing():
            reader = _Reader(architecture, source, weight_format)
            # The largest matrices first: what was read last is waited for.
            embedding = source.stored(EMBEDDING)
            head = weight_format.linear([embedding if source.head == EMBEDDING else source.stored(source.head)])
            table = weight_format.table(embedding)
            layers = []
            for index, kind in enumerate(architecture.layers):
                layers.append(reader.layer(index, kind))
                progress((index + 1) / (architecture.num_layers + 1))
            final_norm = weight_format.vector(source.tensor(FINAL_NORM) + architecture.norm_offset)
        weights = cls(architecture, table, tuple(layers), final_norm, head)
        progress(1.0)
        return weights


class _Reader:
    """Builds layers from a checkpoint's tensors."""

    def __init__(self, architecture: ModelArchitecture, source: Checkpoint, weight_format: WeightFormat) -> None:
        self._architecture = architecture
        self._source = source
        self._weight_format = weight_format

    def layer(self, index: int, kind: LayerKind) -> Layer:
        a = self._architecture
        return Layer(
            input_norm=self._norm(index, "input_layernorm"),
            qkv=self._linear(index, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", with_bias=a.qkv_bias),
            query_norm=self._norm(index, "self_attn.q_norm") if a.qk_norm else None,
            key_norm=self._norm(index, "self_attn.k_norm") if a.qk_norm else None,
            attention_output=self._linear(index, "self_attn.o_proj", with_bias=a.output_bias),
            attention_output_norm=self._norm(index, "post_attention_layernorm") if a.sandwich_norms else None,
            mlp_norm=self._norm(index, "pre_feedforward_layernorm" if a.sandwich_norms else "post_attention_layernorm"),
            mlp=self._mlp(index, "mlp") if kind.experts is None else self._mixture(index, kind.experts),
            mlp_output_norm=self._norm(index, "post_feedforward_layernorm") if a.sandwich_norms else None,
        )

    def _mixture(self, index: int, experts: Experts) -> Mixture:
        shared = None
        if experts.shared_intermediate_size:
            gate = self._exact(index, "mlp.shared_expert_gate")
            shared = SharedExpert(self._mlp(index, "mlp.shared_expert"), gate)
        mlps = tuple(self._mlp(index, f"mlp.experts.{number}") for number in range(experts.count))
        return Mixture(experts, self._exact(index, "mlp.gate"), self._weight_format.experts(mlps), shared)

    def _mlp(self, index: int, prefix: str) -> MLP:
        has_bias = self._architecture.mlp_bias
        return MLP(
            self._linear(index, f"{prefix}.gate_proj", f"{prefix}.up_proj", with_bias=has_bias),
            self._linear(index, f"{prefix}.down_proj", with_bias=has_bias),
        )

    def _linear(self, index: int, *parts: str, with_bias: bool) -> Linear:
        """Return the product with the concatenated weights of `parts`."""
        names = [layer_tensor(index, part) for part in parts]
        product = self._weight_format.linear([self._source.stored(name) for name in names])
        if not with_bias:
            return product
        bias = torch.cat([self._source.tensor(name.removesuffix("weight") + "bias") for name in names])
        return BiasedLinear(product, self._weight_format.vector(bias))

    def _exact(self, index: int, part: str) -> Linear:
        return self._weight_format.exact(self._source.stored(layer_tensor(index, part)))

    def _norm(self, index: int, part: str) -> torch.Tensor:
        # Adding the offset to the weight here saves an operation per step; the sum is float32 either way.
        return self._weight_format.vector(
            self._source.tensor(layer_tensor(index, part)) + self._architecture.norm_offset
        )
