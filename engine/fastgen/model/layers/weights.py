"""Weights of a decoder, fused and packed for the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastgen.model.checkpoint.checkpoint import Checkpoint, EmbeddingTable
from fastgen.model.config.architecture import (
    EMBEDDING,
    FINAL_NORM,
    LAYER_EMBEDDING,
    LAYER_EMBEDDING_NORM,
    LAYER_EMBEDDING_PROJECTION,
    MIXTURE_NORMS,
    Experts,
    LayerKind,
    ModelArchitecture,
    layer_tensor,
    sinks_tensor,
)
from fastgen.model.layers.linear import BiasedLinear, Linear, WeightFormat
from fastgen.model.layers.linear_attention import DeltaWeights
from fastgen.model.partition import UNDIVIDED, Partition

_CORRECTION = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP."""

    gate_up: Linear  # hidden -> 2 * intermediate, the gate first
    down: Linear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that processes every token, weighted by the sigmoid of its gate, if it has one."""

    mlp: MLP
    gate: Linear | None  # hidden -> 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts, of which a rank holds some.

    Attributes:
        shape: numbers and sizes, and how experts are chosen.
        router: hidden -> experts.
        correction: [experts] float32, of `SigmoidRouting`.
        own: numbers of the experts that this rank holds.
        experts: a tuple of `MLP`, or what the weight format made of it.
        input_scales: [hidden] float32, factors of the experts' inputs that the router does not see; None for 1.
        expert_scales: [experts] float32, factors of the experts' weights; None for 1.
    """

    shape: Experts
    router: Linear
    correction: torch.Tensor | None
    own: range
    experts: Any
    shared: SharedExpert | None
    input_scales: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MLPAndMixture:
    """An MLP and a mixture of experts whose results are normalised and added. Norms are [hidden] float32.

    The mixture's input is the residual stream, with a norm whose weights are 1 (`unit_norm`).
    """

    mlp: MLP
    mlp_output_norm: torch.Tensor
    unit_norm: torch.Tensor
    mixture: Mixture
    mixture_output_norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerEmbeddingWeights:
    """Embeddings of tokens for all layers, see `LayerEmbeddings`."""

    table: EmbeddingTable  # [vocabulary, layers * size]
    projection: Linear  # hidden -> layers * size
    norm: torch.Tensor  # [size] float32


@dataclass(frozen=True, slots=True)
class LayerInput:
    """How a layer adds its embeddings of the tokens to the residual stream."""

    gate: Linear  # hidden -> size
    output: Linear  # size -> hidden
    output_norm: torch.Tensor  # [hidden] float32


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Projections and further weights of linear attention."""

    qkvz: Linear  # hidden -> queries, keys, values and gates of the results
    ba: Linear  # hidden -> 2 * value heads: what strengths and decays depend on
    weights: DeltaWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Projections of the same input are one product. Norms are [hidden] float32.

    Attributes:
        qkv: hidden -> (heads + 2 * kv heads) * head_dim, or heads * head_dim in a layer without keys and values of its
            own; None in a layer with linear attention.
        gate: hidden -> heads * head_dim, see `ModelArchitecture.gated_attention`; None without one.
        delta: linear attention; None in a layer with attention.
        query_norm, key_norm: [head_dim] float32, applied per head, or [width of all heads]; None if there is none.
        sinks: [heads] float32, scores without a value in the softmax of each head; None if the family has none.
        input_norm, mlp_norm: norms of the blocks' inputs; None if the family has none.
        attention_output_norm, mlp_output_norm: norms of the blocks' outputs; None if the family has none.
        embedding: the layer's embeddings of tokens; None if the family has none.
        scale: factor of the residual stream at the end of the layer; None for 1.
    """

    input_norm: torch.Tensor | None
    qkv: Linear | None
    gate: Linear | None
    delta: DeltaLayer | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    attention_output: Linear
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: MLP | Mixture | MLPAndMixture
    mlp_output_norm: torch.Tensor | None
    embedding: LayerInput | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder."""

    architecture: ModelArchitecture
    embedding: EmbeddingTable  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor  # [hidden] float32
    head: Linear  # hidden -> vocabulary, float32
    layer_embeddings: LayerEmbeddingWeights | None = None

    @classmethod
    def load(
        cls,
        architecture: ModelArchitecture,
        source: Checkpoint,
        weight_format: WeightFormat,
        progress: Callable[[float], None],
        partition: Partition = UNDIVIDED,
    ) -> DecoderWeights:
        """Read, fuse and place all weights; `progress` is called with the fraction done, 0 to 1.

        `architecture` and `source` are those of the rank, see `Partition`.
        """
        progress(0.0)
        with weight_format.placing():
            reader = _Reader(architecture, source, weight_format, partition)
            # The largest matrices first: what was read last is waited for.
            embedding = source.stored(EMBEDDING)
            head = weight_format.head(embedding if source.head == EMBEDDING else source.stored(source.head))
            table = weight_format.table(embedding)
            layer_embeddings = reader.layer_embeddings()
            layers = []
            for index, kind in enumerate(architecture.layers):
                layers.append(reader.layer(index, kind))
                progress((index + 1) / (architecture.num_layers + 1))
            final_norm = weight_format.vector(source.tensor(FINAL_NORM) + architecture.norm_offset)
        weights = cls(architecture, table, tuple(layers), final_norm, head, layer_embeddings)
        progress(1.0)
        return weights


class _Reader:
    """Builds layers from a checkpoint's tensors."""

    def __init__(
        self, architecture: ModelArchitecture, source: Checkpoint, weight_format: WeightFormat, partition: Partition
    ) -> None:
        self._architecture = architecture
        self._partition = partition
        self._source = source
        self._weight_format = weight_format

    def layer(self, index: int, kind: LayerKind) -> Layer:
        a, norms = self._architecture, self._architecture.norms
        keys, values = "self_attn.k_proj", "self_attn.k_proj" if kind.keys_as_values else "self_attn.v_proj"
        qkv = ("self_attn.q_proj", *((keys, values) if kind.kv_layer is None else ()))
        attends = kind.delta is None
        return Layer(
            input_norm=self._norm(index, norms.of_inputs[0]),
            qkv=self._linear(index, *qkv, with_bias=a.qkv_bias) if attends else None,
            gate=self._linear(index, "self_attn.gate_proj", with_bias=a.qkv_bias)
            if attends and a.gated_attention
            else None,
            delta=None if attends else self._delta(index),
            query_norm=self._norm_of_heads(index, kind, "q"),
            key_norm=self._norm_of_heads(index, kind, "k") if kind.kv_layer is None else None,
            sinks=self._weight_format.vector(self._source.tensor(sinks_tensor(index))) if a.attention_sinks else None,
            attention_output=self._linear(index, "self_attn.o_proj", with_bias=a.output_bias)
            if attends
            else self._linear(index, "linear_attn.out_proj", with_bias=False),
            attention_output_norm=self._norm(index, norms.of_outputs[0]),
            mlp_norm=self._norm(index, norms.of_inputs[1]),
            mlp=self._feed_forward(index, kind.experts),
            mlp_output_norm=self._norm(index, norms.of_outputs[1]),
            embedding=None if a.layer_embeddings is None else self._layer_input(index),
            scale=self._source.tensor(f"model.layers.{index}.layer_scalar").item() if a.layer_scales else None,
        )

    def layer_embeddings(self) -> LayerEmbeddingWeights | None:
        if self._architecture.layer_embeddings is None:
            return None
        return LayerEmbeddingWeights(
            self._weight_format.table(self._source.stored(LAYER_EMBEDDING)),
            self._weight_format.linear([self._source.stored(LAYER_EMBEDDING_PROJECTION)]),
            self._weight_format.vector(self._source.tensor(LAYER_EMBEDDING_NORM)),
        )

    def _layer_input(self, index: int) -> LayerInput:
        return LayerInput(
            self._linear(index, "per_layer_input_gate", with_bias=False),
            self._linear(index, "per_layer_projection", with_bias=False),
            self._required_norm(index, "post_per_layer_input_norm"),
        )

    def _feed_forward(self, index: int, experts: Experts | None) -> MLP | Mixture | MLPAndMixture:
        if experts is None:
            return self._mlp(index, "mlp")
        if not experts.beside_mlp:
            return self._mixture(index, experts)
        of_mlp, of_inputs, of_results = (self._required_norm(index, name) for name in MIXTURE_NORMS)
        scales = self._source.tensor(f"model.layers.{index}.mlp.gate.per_expert_scale")
        mixture = replace(
            self._mixture(index, experts), input_scales=of_inputs, expert_scales=self._weight_format.vector(scales)
        )
        unit_norm = self._weight_format.vector(torch.ones(self._architecture.hidden_size))
        return MLPAndMixture(self._mlp(index, "mlp"), of_mlp, unit_norm, mixture, of_results)

    def _delta(self, index: int) -> DeltaLayer:
        prefix, vector = f"model.layers.{index}.linear_attn.", self._weight_format.vector
        parts = [self._source.stored(f"{prefix}in_proj_{part}.weight") for part in "ba"]
        filters = [self._source.tensor(f"{prefix}{part}_conv1d.weight") for part in "qkv"]
        return DeltaLayer(
            self._linear(index, *(f"linear_attn.in_proj_{part}" for part in "qkvz"), with_bias=False),
            # Small and sensitive: not quantised, and in float32.
            self._weight_format.float32(torch.cat([part.float32() for part in parts])),
            DeltaWeights(
                filters=vector(torch.cat(filters).squeeze(1).t().contiguous()),
                decay=vector(-self._source.tensor(f"{prefix}A_log").exp()),
                offset=vector(self._source.tensor(f"{prefix}dt_bias")),
                norm=vector(self._source.tensor(f"{prefix}norm.weight")),
            ),
        )

    def _mixture(self, index: int, experts: Experts) -> Mixture:
        shared = None
        if experts.shared_intermediate_size:
            gate = self._exact(index, "mlp.shared_expert_gate") if experts.shared_gate else None
            shared = SharedExpert(self._mlp(index, "mlp.shared_expert"), gate)
        own = self._partition.share(experts.count)
        mlps = tuple(self._mlp(index, f"mlp.experts.{number}") for number in own)
        router, correction = self._router(index, experts)
        return Mixture(experts, router, correction, own, self._weight_format.experts(mlps), shared)

    def _router(self, index: int, experts: Experts) -> tuple[Linear, torch.Tensor | None]:
        if experts.beside_mlp:
            scales = self._source.tensor(f"model.layers.{index}.mlp.gate.scale")
            matrix = self._source.tensor(layer_tensor(index, "mlp.gate")) * scales * len(scales) ** -0.5
            return self._weight_format.float32(matrix), None
        if experts.sigmoid is None:
            router = self._exact(index, "mlp.gate")
            return self._biased(router, [layer_tensor(index, "mlp.gate")]) if experts.router_bias else router, None
        matrix = self._source.tensor(layer_tensor(index, "mlp.gate"))
        if not experts.sigmoid.corrected:
            return self._weight_format.float32(matrix), None
        correction = self._source.tensor(layer_tensor(index, "mlp.gate").removesuffix("weight") + _CORRECTION)
        return self._weight_format.float32(matrix), self._weight_format.vector(correction)

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
        return self._biased(product, names) if with_bias else product

    def _biased(self, product: Linear, names: Sequence[str]) -> Linear:
        """Return a product plus the biases of its weights `names`."""
        bias = torch.cat([self._source.tensor(name.removesuffix("weight") + "bias") for name in names])
        return BiasedLinear(product, self._weight_format.vector(bias))

    def _exact(self, index: int, part: str) -> Linear:
        return self._weight_format.exact(self._source.stored(layer_tensor(index, part)))

    def _norm_of_heads(self, index: int, kind: LayerKind, part: str) -> torch.Tensor | None:
        if not self._architecture.normalises_queries(kind):
            return None
        if self._architecture.qk_norm == "unit":
            return self._weight_format.vector(torch.ones(self._architecture.head_dim))
        return self._required_norm(index, f"self_attn.{part}_norm")

    def _norm(self, index: int, part: str | None) -> torch.Tensor | None:
        return None if part is None else self._required_norm(index, part)

    def _required_norm(self, index: int, part: str) -> torch.Tensor:
        # Adding the offset to the weight here saves an operation per step; the sum is float32 either way.
        return self._weight_format.vector(
            self._source.tensor(layer_tensor(index, part)) + self._architecture.norm_offset
        )
