"""A Llama model's weights as a forward pass wants them: fused, and packed for their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastgen.model import checkpoint
from fastgen.model.architecture import ModelArchitecture
from fastgen.model.checkpoint import Checkpoint, layer_tensor
from fastgen.model.linear import Linear, choose_linear

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; projections that read the same rows are one product. Norms are [hidden]."""

    input_norm: FloatArray
    qkv: Linear  # hidden -> (heads + 2 * kv heads) * head_dim
    attention_output: Linear
    mlp_norm: FloatArray
    gate_up: Linear  # hidden -> 2 * intermediate, the gate first
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights of a model; `rope_factors` as in `Checkpoint`."""

    architecture: ModelArchitecture
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    final_norm: FloatArray  # [hidden]
    head: Linear  # hidden -> vocabulary
    rope_factors: torch.Tensor | None

    @classmethod
    def load(
        cls, architecture: ModelArchitecture, source: Checkpoint, progress: Callable[[float], None]
    ) -> LlamaWeights:
        """Reads, fuses and packs; `progress` hears the share done, 0 to 1.

        Raises:
            ModelError: when a tensor cannot be used.
        """
        progress(0.0)
        embedding = source.tensor(checkpoint.EMBEDDING)
        head = embedding if architecture.tie_word_embeddings else source.tensor(checkpoint.HEAD)
        first = _layer_matrices(source, 0)
        linear = choose_linear([*first, head])
        layers = []
        for index in range(architecture.num_layers):
            qkv, attention_output, gate_up, down = first if index == 0 else _layer_matrices(source, index)
            layers.append(
                Layer(
                    input_norm=source.tensor(layer_tensor(index, "input_layernorm")).numpy(),
                    qkv=linear(qkv),
                    attention_output=linear(attention_output),
                    mlp_norm=source.tensor(layer_tensor(index, "post_attention_layernorm")).numpy(),
                    gate_up=linear(gate_up),
                    down=linear(down),
                )
            )
            progress((index + 1) / (architecture.num_layers + 1))
        final_norm = source.tensor(checkpoint.FINAL_NORM).numpy()
        weights = cls(architecture, embedding, tuple(layers), final_norm, linear(head), source.rope_factors)
        progress(1.0)
        return weights


def _layer_matrices(source: Checkpoint, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fused qkv, attention output, fused gate and up, down."""

    def fused(*parts: str) -> torch.Tensor:
        return torch.cat([source.tensor(layer_tensor(layer, part)) for part in parts])

    return (
        fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        source.tensor(layer_tensor(layer, "self_attn.o_proj")),
        fused("mlp.gate_proj", "mlp.up_proj"),
        source.tensor(layer_tensor(layer, "mlp.down_proj")),
    )
