"""Fields of config.json that change a model's results and that its native family does not have.

transformers ignores them in these families. A file that sets one describes another computation, so it is rejected
rather than served wrongly. Fields that only add tensors are not here: a tensor that nothing reads is rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown

# By name: the values besides null that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # factors and bounds of embeddings, residuals, projections and logits
    "activation_sparsity_pattern": (),
    "attention_in_multiplier": (1,),
    "attention_multiplier": (),
    "attention_out_multiplier": (1,),
    "attention_value_scale": (1,),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (0,),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "final_logit_softcapping": (0,),
    "gate_soft_cap": (0,),
    "key_multiplier": (1,),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_mup_width_multiplier": (1,),
    "logits_scaling": (1,),
    "logits_soft_cap": (0,),
    "mlp_gate_softcap": (0,),
    "mlp_multipliers": (),
    "mlp_up_softcap": (0,),
    "mup_enabled": (False,),
    "normalize_embedding": (False,),
    "output_logit_soft_cap": (0,),
    "qk_l2_clip_threshold": (0,),
    "query_pre_attn_scalar": (),
    "rescale_embeddings": (False,),
    "residual_multiplier": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_depth": (),
    "scale_emb": (1,),
    "scale_embedding": (False,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    # the form of attention, positions and blocks
    "alibi": (False,),
    "attention_chunk_size": (0,),
    "attn_temperature_tuning": (False, 0),
    "causal": (True,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "layer_rope_theta": (),
    "log_scaling_alpha": (0,),
    "log_scaling_n_floor": (),
    "no_rope_layer_interval": (0,),
    "num_kv_shared_layers": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "prefix_lm": (False,),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rotary_dim": (),
    "rotary_emb_base": (),
    "rotary_pct": (1,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_post_norm": (False,),
    "use_qk_norm": (False,),
    "use_sandwich_norm": (False,),
    # the choice and weights of experts
    "decoder_sparse_step": (1,),
    "expert_selection_fn": ("softmax",),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([],),
    "moe_apply_router_weight_on_input": (False,),
    "moe_routed_scaling_factor": (1,),
    "moe_router_logit_softcapping": (0,),
    "n_group": (0, 1),
    "route_scale": (1,),
    "routed_scaling_factor": (1,),
    "router_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "topk_group": (0, 1),
    "topk_method": ("greedy",),
    # other weights than those of the files read here, or another model for each layer
    "compression_config": ({},),
    "per_layer_config": ({},),
    "transformers_weights": (),
}

# Other families' names of a field: they have no effect beside it, and without it the default would be used silently.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "hidden_act": ("activation_function", "hidden_activation"),
    "hidden_activation": ("activation_function", "hidden_act"),
    "max_position_embeddings": ("max_sequence_length", "max_seq_len", "n_ctx", "n_positions", "seq_length"),
}


def reject_unsupported_fields(fields: Fields) -> None:
    """Check the fields that the model's family has not read.

    Raises:
        ModelError: naming a field that would change the results.
    """
    kind, unread = fields.text("model_type"), fields.unread()
    for name, value in unread.items():
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise ModelError(f"{name} is {shown(value)}: models of type {kind} are not supported with it")
    rope_layers = unread.get("no_rope_layers")  # 1 for each layer with rotary positions
    if rope_layers and rope_layers != [1] * fields.integer("num_hidden_layers"):
        raise ModelError(f"no_rope_layers is {shown(rope_layers)}: layers without rotary positions are not supported")
    for field, others in _OTHER_NAMES.items():
        for name in others:
            if name in unread and fields.reads(field) and not fields.has(field):
                raise ModelError(f"{name} is set, but models of type {kind} have {field}: rename it")
