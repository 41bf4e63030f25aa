"""A model's shape, read from a GGUF file's metadata or a Hugging Face config.json.

Whatever would be served wrong is refused by name: a wrong answer is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgen.model.errors import ModelError

# Hugging Face's model_type -> the class whose computation this engine does.
_HUGGINGFACE_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_GGUF_TYPES = ("llama",)


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretched rotary frequencies; names as in Hugging Face's `rope_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Attributes:
        name: the family, "llama".
        eos_token_ids: every token that ends a generation.
        bos_token_id: the token that begins a text, or None.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied head counts once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, tied: bool = True) -> ModelArchitecture:
        """The shape that a GGUF file's metadata describes.

        Args:
            metadata: the file's key-value pairs.
            tied: whether the head shares the embedding, that is: the file has no `output.weight`.

        Raises:
            ModelError: naming the key at fault.
        """
        kind = metadata.get("general.architecture")
        if kind not in _GGUF_TYPES:
            raise ModelError(f"general.architecture is {kind!r}: this engine serves {', '.join(_GGUF_TYPES)}")
        _refuse_gguf(metadata)
        fields = _Fields(metadata, prefix="llama.")
        heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
        head_dim = fields.integer("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if fields.integer(key, head_dim) != head_dim:
                raise ModelError(
                    f"llama.{key} is {fields.integer(key, head_dim)}, not the head size {head_dim}: not served"
                )
        ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
        vocabulary = fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
        return cls(
            name="llama",
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            rope_scaling=None,  # a GGUF file has the stretched frequencies as a tensor, rope_freqs.weight
            tie_word_embeddings=tied,
            eos_token_ids=frozenset(int(token) for token in ends if token is not None),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )

    @classmethod
    def from_huggingface(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
    ) -> ModelArchitecture:
        """The shape that config.json describes; generation_config.json may add end tokens.

        Raises:
            ModelError: naming the field at fault.
        """
        _refuse_huggingface(config)
        fields = _Fields(config)
        heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        theta, scaling = _rope(config)
        ends = _token_ids(config.get("eos_token_id")) | _token_ids((generation_config or {}).get("eos_token_id"))
        return cls(
            name="llama",
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=ends,
            bos_token_id=config.get("bos_token_id"),
        )


class _Fields:
    """Typed look-ups that name the field when it is missing or of another type. null counts as missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._prefix}{name} is {value!r}: a whole number above 0 was expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self._prefix}{name} is {value!r}: a number above 0 was expected")
        return float(value)

    def _get(self, name: str, default: float | None) -> Any:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{name} is missing from the model's configuration")
        return value


def _refuse_gguf(metadata: Mapping[str, Any]) -> None:
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"llama.rope.scaling.type is {scaling!r}: this rope scaling is not served")
    if metadata.get("llama.expert_count", 0):
        raise ModelError("llama.expert_count is set: mixtures of experts are not served")
    window = metadata.get("llama.attention.sliding_window", 0)
    if window and window < metadata.get("llama.context_length", 0):
        raise ModelError(f"llama.attention.sliding_window is {window}: sliding-window attention is not served")


def _refuse_huggingface(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in _HUGGINGFACE_TYPES:
        raise ModelError(f"config.json: model_type is {kind!r}: this engine serves {', '.join(_HUGGINGFACE_TYPES)}")
    classes = config.get("architectures")
    if classes and _HUGGINGFACE_TYPES[kind] not in classes:
        raise ModelError(f"config.json: architectures is {classes}: only {_HUGGINGFACE_TYPES[kind]} is served")
    if config.get("quantization_config"):
        raise ModelError("config.json: quantization_config is set: quantised checkpoints are not served, use GGUF")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ModelError(f"config.json: {name} is true: models with these biases are not served")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {activation!r}: only silu is served")
    window = config.get("sliding_window")
    if window and window < config.get("max_position_embeddings", 0):
        raise ModelError(f"config.json: sliding_window is {window}: sliding-window attention is not served")
    if config.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor is not 1: partial rotary positions are not served")


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = _Fields({"rope_theta": parameters.get("rope_theta", config.get("rope_theta"))}).number(
        "rope_theta", 10000.0
    )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor is not 1: partial rotary positions are not served")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"config.json: rope_type is {kind!r}: only default and llama3 rope scaling are served")
    fields = _Fields(parameters)
    original = config.get("max_position_embeddings")
    return theta, Llama3RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", original),
    )


def _token_ids(value: Any) -> frozenset[int]:
    """`eos_token_id` may be missing, a number or a list."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
