"""Writes transformers' models as GGUF files, as llama.cpp's converter does.

Tensor names and keys come from the gguf package, not from the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_MOE,  # see `_architecture`
}


def write_gguf(model: PreTrainedModel, path: Path, kind: str = "F32", **numbers: int) -> Path:
    """Write `model` to `path`: matrices whose rows are whole blocks as `kind`, all else as float32.

    `numbers` are further keys of the architecture.
    """
    config: Any = model.config
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_keys(writer, config)
    for name, number in numbers.items():
        writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name}", number)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, values in _tensors(model):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        is_matrix = values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[quantisation][0] == 0
        used = quantisation if is_matrix and "gate_inp" not in stored else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), used), raw_dtype=used)
    for stored, factors in _rotary_tensors(config):
        writer.add_tensor(stored, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(config: Any) -> gguf.MODEL_ARCH:
    is_dense = config.model_type == "granitemoehybrid" and not config.num_local_experts
    return gguf.MODEL_ARCH.GRANITE if is_dense else ARCHITECTURES[config.model_type]


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names as in the hub's checkpoints and values as the converter stores them."""
    config: Any = model.config
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, tensor in _unstacked(name, parameter):
            values = tensor.float().numpy()
            if config.model_type in ("llama", "mistral", "mixtral") or config.model_type.startswith("granite"):
                if ".q_proj." in part:
                    values = _paired(values, config.num_attention_heads)
                elif ".k_proj." in part:
                    values = _paired(values, config.num_key_value_heads)
            if config.model_type.startswith("gemma") and part.endswith("norm.weight"):
                values = values + np.float32(1)
            if part.endswith("shared_expert_gate.weight"):
                values = values[0]
            yield (_usual_name(part, config) if config.model_type.startswith("granite") else part), values


def _unstacked(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split stacked gate and up projections, which GGUF stores separately."""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = values.chunk(2)
        yield name.replace("input_linear", "gate_proj"), gate
        yield name.replace("input_linear", "up_proj"), up
        return
    if name.endswith("experts.gate_up_proj"):
        gate, up = values.chunk(2, dim=-2)
        stem = name.removesuffix("gate_up_proj")
        yield f"{stem}gate_proj.weight", gate
        yield f"{stem}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    else:
        yield name, values


def _usual_name(name: str, config: Any) -> str:
    """Return the name that other families have for a tensor of Granite's."""
    shared = "mlp.shared_expert." if getattr(config, "num_local_experts", 0) else "mlp."
    names = {"block_sparse_moe.router.": "mlp.gate.", "block_sparse_moe.": "mlp."}
    names |= {"shared_mlp.output_linear.": f"{shared}down_proj.", "shared_mlp.": shared}
    own = next((own for own in names if own in name), "")
    return name.replace(own, names[own]) if own else name


def _paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the rows of the two halves of each head."""
    return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    is_hybrid = config.model_type == "granitemoehybrid"
    kv_heads = config.num_key_value_heads
    writer.add_head_count_kv([kv_heads] * config.num_hidden_layers if is_hybrid else kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    if config.model_type != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) and not config.model_type.startswith("qwen"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if is_hybrid:  # also without Mamba layers
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    _add_experts(writer, config)
    _add_rotary(writer, config, head_dim)


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type.startswith("qwen"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_rotary(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _rotary_tensors(config: Any) -> Iterator[tuple[str, list[float]]]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", rope["long_factor"]
        yield "rope_factors_short.weight", rope["short_factor"]
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)


def _llama3_factors(config: Any, rope: dict[str, Any]) -> list[float]:
    head_dim = config.hidden_size // config.num_attention_heads
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for place in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (place / head_dim)
        smooth = (original / length - low) / (high - low)
        factors.append(1 / ((1 - min(1, max(0, smooth))) / rope["factor"] + min(1, max(0, smooth))))
    return factors
