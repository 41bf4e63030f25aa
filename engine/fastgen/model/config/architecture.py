"""Family-independent description of a decoder, used by the forward pass and the weight loader.

`from_huggingface` and `from_gguf` build it from a model's configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fastgen.model import ModelError
from fastgen.model.config.rope import LongScaling, RopeConfig

Activation = Literal["silu", "gelu_tanh"]

# More than any model has: bounds keep a damaged file from asking for unbounded memory.
MOST_LAYERS = 4096
_MOST_EXPERTS = 1 << 17

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        count, top_k: number of experts, and how many of them process each token.
        intermediate_size: width of one expert.
        normalised: whether the weights of a token's experts are normalised to sum to 1.
        shared_intermediate_size: width of the shared expert, which has a sigmoid gate; 0 without one.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalised: bool
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise ModelError(f"{self.top_k} experts per token, but the layers have only {self.count}")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The features that may differ between layers.

    Attributes:
        window: sliding window in tokens, including the token itself; None for full attention.
        rope: index in `ModelArchitecture.rope_configs`.
        experts: mixture of experts; None for a plain MLP.
    """

    window: int | None = None
    rope: int = 0
    experts: Experts | None = None

    def within(self, length: int) -> LayerKind:
        """Return the layer without a window if no sequence is longer than the window."""
        return self if self.window is None or self.window < length else replace(self, window=None)


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder with RMS norms, rotary positions, grouped-query attention and gated MLPs.

    Attributes:
        name: the family, as Hugging Face's model_type.
        mlp_size: width of the MLP in layers without experts.
        max_position_embeddings: longest sequence that can be served.
        norm_offset: added to the weights of all norms.
        sandwich_norms: whether the outputs of attention and MLP are normalised too.
        qk_norm: whether queries and keys are normalised per head before the rotary embedding.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        attention_scale: factor of the attention scores.
        attention_softcap, logit_softcap: bound of scores and logits, applied by tanh; None for no bound.
        embedding_scale: factor of the embeddings.
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
    sandwich_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    has_head: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        for rope in self.rope_configs:
            if rope.dimensions % 2:
                raise ModelError(f"each head rotates {rope.dimensions} dimensions, an odd number: rotation needs pairs")
        experts = sum(layer.experts.count for layer in self.layers if layer.experts)
        if experts > _MOST_EXPERTS:
            raise ModelError(f"the layers have {experts} experts: expected at most {_MOST_EXPERTS}")
        assert all(layer.rope < len(self.rope_configs) for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def head(self) -> str:
        """Name of the output head's tensor: the embedding, if the two are tied."""
        return EMBEDDING if self.tie_word_embeddings else HEAD

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
        widths = [self.mlp_size]
        for layer in self.layers:
            if layer.experts is not None:
                mixed = layer.experts.top_k * layer.experts.intermediate_size
                widths.append(mixed + layer.experts.shared_intermediate_size)
        return max(widths)

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
        for index, layer in enumerate(self.layers):
            for part, shape in (self._attention_shapes() | self._norm_shapes() | self._mlp_shapes(layer)).items():
                shapes[f"model.layers.{index}.{part}"] = shape
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inputs = {"self_attn.q": queries, "self_attn.k": keys, "self_attn.v": keys}
        shapes = _projections({name: (width, self.hidden_size) for name, width in inputs.items()}, self.qkv_bias)
        shapes |= _projections({"self_attn.o": (self.hidden_size, queries)}, self.output_bias)
        if self.qk_norm:
            shapes |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in ("q", "k")}
        return shapes

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        return {f"{name}.weight": (self.hidden_size,) for name in names}

    def _mlp_shapes(self, layer: LayerKind) -> dict[str, tuple[int, ...]]:
        if layer.experts is None:
            return self._gated_shapes("mlp", self.mlp_size)
        experts = layer.experts
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, self.hidden_size)}
        for number in range(experts.count):
            shapes |= self._gated_shapes(f"mlp.experts.{number}", experts.intermediate_size)
        if experts.shared_intermediate_size:
            shapes |= self._gated_shapes("mlp.shared_expert", experts.shared_intermediate_size)
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden_size)
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
