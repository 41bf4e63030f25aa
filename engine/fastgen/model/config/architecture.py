"""Family-independent description of a decoder, used by the forward pass and the weight loader.

`from_huggingface` and `from_gguf` build it from a model's configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fastgen.model import ModelError
from fastgen.model.config.rope import LongScaling, NoRotation, QueryScaling, RopeConfig

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
QKNorm = Literal["heads", "whole", "unit"]

# More than any model has: bounds keep a damaged file from asking for unbounded memory.
MOST_LAYERS = 4096
_MOST_EXPERTS = 1 << 17

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_EMBEDDING_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_EMBEDDING_NORM = "model.per_layer_projection_norm.weight"
# Of a mixture beside an MLP: norms of the MLP's results, of the experts' inputs and of their results.
MIXTURE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Experts are chosen and weighted by the sigmoid of their logit (DeepSeek-V3, 2024).

    Attributes:
        corrected: whether a learnt correction is added for the choice.
        groups, used_groups: only experts in the best groups are chosen; a group's score is that of its best two.
        scale: factor of the experts' weights.
    """

    groups: int = 1
    used_groups: int = 1
    scale: float = 1.0
    corrected: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        count, top_k: number of experts, and how many of them process each token.
        intermediate_size: width of one expert.
        normalised: whether the weights of a token's experts are normalised to sum to 1.
        shared_intermediate_size: width of the shared expert; 0 without one.
        shared_gate: whether the shared expert has a sigmoid gate.
        sigmoid: how experts are chosen; None for the largest softmax probabilities.
        router_bias: whether the router has a bias.
        scales_inputs: whether an expert's weight is a factor of its inputs, not of its results (Llama 4).
        beside_mlp: whether the layer also has the plain MLP. Both have norms of their own for their results, which are
            added; the router has a learnt scale for each input and each expert (Gemma 4).
    """

    count: int
    top_k: int
    intermediate_size: int
    normalised: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    sigmoid: SigmoidRouting | None = None
    router_bias: bool = False
    scales_inputs: bool = False
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise ModelError(f"{self.top_k} experts per token, but the layers have only {self.count}")

    @property
    def has_valid_groups(self) -> bool:
        """Whether experts are in equal groups of at least two, and the used ones have enough for a token."""
        routing = self.sigmoid or SigmoidRouting()
        size = self.count // routing.groups
        is_divided = routing.groups == 1 or (size > 1 and self.count == size * routing.groups)
        return is_divided and routing.used_groups <= routing.groups and self.top_k <= size * routing.used_groups


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention by the gated delta rule, in place of attention (Yang et al., 2024).

    Attributes:
        key_heads, value_heads: each key head serves as many consecutive value heads as all others.
        key_dim, value_dim: of one head; queries are like keys.
        kernel_size: tokens that the causal convolution of queries, keys and values spans.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    def __post_init__(self) -> None:
        assert self.value_heads % self.key_heads == 0

    @property
    def keys(self) -> int:
        """Width of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of attention.

    Attributes:
        num_kv_heads: heads of keys and values.
        head_dim: size of a head.
    """

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Each token has an embedding for every layer, which the layer adds to the residual stream after a gate (Gemma 3n).

    Attributes:
        vocab_size: number of embeddings.
        size: of an embedding for one layer.
    """

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The features that may differ between layers.

    Attributes:
        window: sliding window in tokens, including the token itself; None for full attention.
        chunk: size of chunks of positions within which tokens attend to each other; None for the whole sequence.
        scales_queries: whether the model's `query_scaling` applies, if it has one.
        rope: index in `ModelArchitecture.rope_configs`.
        experts: mixture of experts; None for a plain MLP.
        delta: linear attention; None for attention.
        heads: other heads than the model's; None for those of the model.
        kv_layer: index of the earlier layer whose keys and values the layer attends to; None for its own.
        keys_as_values: whether the values are the keys before their norm and rotation, so without a projection.
        mlp_size: width of the MLP if it is not the model's.
    """

    window: int | None = None
    rope: int = 0
    experts: Experts | None = None
    delta: DeltaRule | None = None
    heads: Heads | None = None
    kv_layer: int | None = None
    keys_as_values: bool = False
    mlp_size: int | None = None
    chunk: int | None = None
    scales_queries: bool = True

    @property
    def is_windowed(self) -> bool:
        """Whether it has a sliding window."""
        return self.window is not None

    def within(self, length: int) -> LayerKind:
        """Return the layer without a window or chunks that no sequence exceeds."""
        window, chunk = (size if size is not None and size < length else None for size in (self.window, self.chunk))
        return replace(self, window=window, chunk=chunk)


class NormNames(NamedTuple):
    """Names of the norms of attention and MLP; None where there is no norm."""

    of_inputs: tuple[str | None, str | None]
    of_outputs: tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder with RMS norms, rotary positions, grouped-query attention and gated MLPs.

    Attributes:
        name: the family, as Hugging Face's model_type.
        mlp_size: width of the MLP in layers without experts.
        max_position_embeddings: longest sequence that can be served.
        norm_offset: added to the weights of all norms.
        input_norms: whether the inputs of attention and MLP are normalised.
        output_norms: whether their outputs are normalised before they are added to the residual stream.
        qk_norm: whether queries and keys are normalised before the rotary embedding: per head, all heads together, or
            per head without weights and only where they are rotated (Llama 4).
        value_norm: whether the values of each head are divided by their RMS.
        gated_attention: whether the output of attention is multiplied with the sigmoid of a further projection.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        attention_sinks: whether each head has a learnt score in its softmax, without a value (Xiao et al., 2023).
        attention_scale: factor of the attention scores.
        attention_softcap, logit_softcap: bound of scores and logits, applied by tanh; None for no bound.
        embedding_scale, residual_scale, logit_scale: factors of the embeddings, of the outputs of attention and MLP,
            and of the logits.
        query_scaling: of queries at positions beyond the original length, or None.
        layer_embeddings: embeddings of tokens for each layer, or None.
        layer_scales: whether each layer multiplies the residual stream with a learnt factor at its end.
        has_head: whether the checkpoint can generate. Without a head, only its hidden states have a meaning.
        eos_token_ids: all tokens that end a generation.
    """

    name: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_configs: tuple[RopeConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    activation: Activation = "silu"
    norm_offset: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    qk_norm: QKNorm | None = None
    value_norm: bool = False
    gated_attention: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    query_scaling: QueryScaling | None = None
    layer_embeddings: LayerEmbeddings | None = None
    layer_scales: bool = False
    has_head: bool = True

    def __post_init__(self) -> None:
        for heads in (self.heads, self.other_heads or self.heads):
            if self.num_heads % heads.num_kv_heads:
                raise ModelError(
                    f"{self.num_heads} attention heads cannot share {heads.num_kv_heads} key-value heads evenly"
                )
        for rope in self.rope_configs:
            if rope.dimensions % 2:
                raise ModelError(f"each head rotates {rope.dimensions} dimensions, an odd number: rotation needs pairs")
        experts = sum(layer.experts.count for layer in self.layers if layer.experts)
        if experts > _MOST_EXPERTS:
            raise ModelError(f"the layers have {experts} experts: expected at most {_MOST_EXPERTS}")
        assert all(layer.rope < len(self.rope_configs) for layer in self.layers)
        if len({layer.delta for layer in self.layers if layer.delta is not None}) > 1:
            raise ModelError("layers with linear attention of several sizes are not supported")
        assert len({layer.heads for layer in self.layers if layer.heads is not None}) <= 1

    @property
    def heads(self) -> Heads:
        """The heads of layers that have no others."""
        return Heads(self.num_kv_heads, self.head_dim)

    @property
    def other_heads(self) -> Heads | None:
        """The heads of layers that have others than the model, all alike; None if there are none."""
        return next((layer.heads for layer in self.layers if layer.heads is not None), None)

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        return self.layers[layer].heads or self.heads

    def normalises_queries(self, layer: LayerKind) -> bool:
        """Return whether a layer normalises queries and keys."""
        is_rotated = not isinstance(self.rope_configs[layer.rope].scaling, NoRotation)
        return layer.delta is None and self.qk_norm is not None and (is_rotated or self.qk_norm != "unit")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def delta(self) -> DeltaRule | None:
        """The linear attention of some layers, all alike; None if all have attention."""
        return next((layer.delta for layer in self.layers if layer.delta is not None), None)

    @property
    def places(self) -> tuple[int, ...]:
        """For each layer, how many before it are of its kind: its place in its KV cache or among recurrent states.

        A layer without keys and values of its own has the place of those that it attends to.
        """
        return self.places_of(by_window=False)

    def places_of(self, *, by_window: bool) -> tuple[int, ...]:
        """Return the `places`; with `by_window`, layers with a sliding window are of other kinds than those without."""
        kinds = [
            None if layer.kv_layer is not None else (layer.delta is None, layer.heads, by_window and layer.is_windowed)
            for layer in self.layers
        ]
        sources = [index if layer.kv_layer is None else layer.kv_layer for index, layer in enumerate(self.layers)]
        return tuple(kinds[:source].count(kinds[source]) for source in sources)

    def num_cached_layers(self, heads: Heads | None = None, *, is_windowed: bool | None = None) -> int:
        """Return the number of layers with own keys and values, and with these heads; None for those of the model.

        Only those with or without a sliding window, if `is_windowed` is given.
        """
        return sum(
            layer.delta is None
            and layer.kv_layer is None
            and layer.heads == heads
            and is_windowed in (None, layer.is_windowed)
            for layer in self.layers
        )

    @property
    def longest_window(self) -> int | None:
        """The longest sliding window, if layers with a window can have KV blocks of their own, otherwise None.

        They can if other layers keep all tokens and no layer has a recurrent state.
        """
        windows = [layer.window for layer in self.layers if layer.window is not None]
        keeps_all = any(layer.kv_layer is None and not layer.is_windowed for layer in self.layers)
        sources = [layer if layer.kv_layer is None else self.layers[layer.kv_layer] for layer in self.layers]
        is_apart = all(a.is_windowed == b.is_windowed for a, b in zip(self.layers, sources, strict=True))
        return max(windows) if windows and keeps_all and is_apart and self.delta is None else None

    @property
    def head(self) -> str:
        """Name of the output head's tensor: the embedding, if the two are tied."""
        return EMBEDDING if self.tie_word_embeddings else HEAD

    @property
    def norms(self) -> NormNames:
        """Names of a layer's norms, as in Gemma 2; Llama calls that of the MLP's input `post_attention_layernorm`."""
        of_mlp = "pre_feedforward_layernorm" if self.output_norms else "post_attention_layernorm"
        return NormNames(
            of_inputs=("input_layernorm", of_mlp) if self.input_norms else (None, None),
            of_outputs=("post_attention_layernorm", "post_feedforward_layernorm")
            if self.output_norms
            else (None, None),
        )

    @property
    def widest_norm(self) -> int:
        """Width of the widest norm of queries or keys."""
        return self.num_heads * self.head_dim if self.qk_norm == "whole" else self.head_dim

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def longest_with_short_factors(self) -> int | None:
        """Longest sequence to which LongRoPE's short factors apply; None without LongRoPE."""
        originals = [
            rope.scaling.original_max_position_embeddings
            for rope in self.rope_configs
            if isinstance(rope.scaling, LongScaling)
        ]
        return min(originals, default=None)

    @property
    def default_length(self) -> int:
        """Default of --max-model-length: the longest sequence for which results equal transformers'."""
        return min(self.max_position_embeddings, self.longest_with_short_factors or self.max_position_embeddings)

    @property
    def intermediate_size(self) -> int:
        """Activations per token in the widest MLP, summed over a token's experts."""
        widths = [self.mlp_size, *(layer.mlp_size for layer in self.layers if layer.mlp_size is not None)]
        if self.layer_embeddings is not None:
            widths.append(self.layer_embeddings.size)
        for layer in self.layers:
            if layer.experts is not None:
                mixed = layer.experts.top_k * layer.experts.intermediate_size
                widths.append(mixed + layer.experts.shared_intermediate_size)
        return max(widths)

    @property
    def most_experts(self) -> int:
        """Largest number of experts in a layer; 0 without mixtures."""
        return max((layer.experts.count for layer in self.layers if layer.experts), default=0)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by Hugging Face's names for Llama, Qwen2-MoE and Gemma 2."""
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, self.hidden_size),
            FINAL_NORM: (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        if (embeddings := self.layer_embeddings) is not None:
            width = self.num_layers * embeddings.size
            shapes[LAYER_EMBEDDING] = (embeddings.vocab_size, width)
            shapes[LAYER_EMBEDDING_PROJECTION] = (width, self.hidden_size)
            shapes[LAYER_EMBEDDING_NORM] = (embeddings.size,)
        for index, layer in enumerate(self.layers):
            attention = self._attention_shapes(layer) if layer.delta is None else self._delta_shapes(layer.delta)
            parts = attention | self._norm_shapes() | self._mlp_shapes(layer) | self._layer_input_shapes()
            for part, shape in parts.items():
                shapes[f"model.layers.{index}.{part}"] = shape
        return shapes

    def _attention_shapes(self, layer: LayerKind) -> dict[str, tuple[int, ...]]:
        heads = layer.heads or self.heads
        queries, keys = self.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        inputs = {"self_attn.q": queries}
        if layer.kv_layer is None:
            inputs |= {"self_attn.k": keys} | ({} if layer.keys_as_values else {"self_attn.v": keys})
        shapes = _projections({name: (width, self.hidden_size) for name, width in inputs.items()}, self.qkv_bias)
        if self.gated_attention:
            shapes |= _projections({"self_attn.gate": (queries, self.hidden_size)}, self.qkv_bias)
        shapes |= _projections({"self_attn.o": (self.hidden_size, queries)}, self.output_bias)
        if self.attention_sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        if self.qk_norm not in (None, "unit"):
            sizes = {"q": queries, "k": keys} if self.qk_norm == "whole" else dict.fromkeys("qk", heads.head_dim)
            shapes |= {
                f"self_attn.{part}_norm.weight": (size,)
                for part, size in sizes.items()
                if f"self_attn.{part}" in inputs
            }
        return shapes

    def _delta_shapes(self, delta: DeltaRule) -> dict[str, tuple[int, ...]]:
        mixed = {"q": delta.keys, "k": delta.keys, "v": delta.values}
        widths = {**mixed, "z": delta.values, "b": delta.value_heads, "a": delta.value_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"linear_attn.in_proj_{part}.weight": (width, self.hidden_size) for part, width in widths.items()
        }
        shapes |= {f"linear_attn.{part}_conv1d.weight": (width, 1, delta.kernel_size) for part, width in mixed.items()}
        return shapes | {
            "linear_attn.A_log": (delta.value_heads,),
            "linear_attn.dt_bias": (delta.value_heads,),
            "linear_attn.norm.weight": (delta.value_dim,),
            "linear_attn.out_proj.weight": (self.hidden_size, delta.values),
        }

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        names = [*self.norms.of_inputs, *self.norms.of_outputs]
        return {f"{name}.weight": (self.hidden_size,) for name in names if name is not None}

    def _layer_input_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"layer_scalar": (1,)} if self.layer_scales else {}
        if (embeddings := self.layer_embeddings) is not None:
            shapes["per_layer_input_gate.weight"] = (embeddings.size, self.hidden_size)
            shapes["per_layer_projection.weight"] = (self.hidden_size, embeddings.size)
            shapes["post_per_layer_input_norm.weight"] = (self.hidden_size,)
        return shapes

    def _mlp_shapes(self, layer: LayerKind) -> dict[str, tuple[int, ...]]:
        mlp = self._gated_shapes("mlp", layer.mlp_size or self.mlp_size)
        if layer.experts is None:
            return mlp
        experts = layer.experts
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, self.hidden_size)}
        if experts.beside_mlp:
            shapes |= mlp | {"mlp.gate.scale": (self.hidden_size,), "mlp.gate.per_expert_scale": (experts.count,)}
            shapes |= {f"{name}.weight": (self.hidden_size,) for name in MIXTURE_NORMS}
        for number in range(experts.count):
            shapes |= self._gated_shapes(f"mlp.experts.{number}", experts.intermediate_size)
        if experts.shared_intermediate_size:
            shapes |= self._gated_shapes("mlp.shared_expert", experts.shared_intermediate_size)
        if experts.shared_intermediate_size and experts.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
        if experts.sigmoid is not None and experts.sigmoid.corrected:
            shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
        if experts.router_bias:
            shapes["mlp.gate.bias"] = (experts.count,)
        return shapes

    def _gated_shapes(self, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        wide, narrow = (width, self.hidden_size), (self.hidden_size, width)
        return _projections({f"{prefix}.gate": wide, f"{prefix}.up": wide, f"{prefix}.down": narrow}, self.mlp_bias)


def _projections(sizes: dict[str, tuple[int, int]], has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of projections' weights [out, in] and, if they have them, biases [out]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        shapes[f"{name}_proj.weight"] = size
        if has_bias:
            shapes[f"{name}_proj.bias"] = size[:1]
    return shapes


def layer_tensor(layer: int, part: str) -> str:
    """Return the full name of a layer's weight, for example of `self_attn.q_proj`."""
    return f"model.layers.{layer}.{part}.weight"


def sinks_tensor(layer: int) -> str:
    """Return the full name of the tensor of a layer's attention sinks."""
    return f"model.layers.{layer}.self_attn.sinks"
