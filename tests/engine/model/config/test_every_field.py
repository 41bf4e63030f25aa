"""Every field of transformers' configuration classes: honoured, rejected by name, or known to change no number.

The fields are read from the classes. A newer transformers with a new field fails a test here, until the field is
served, rejected, or entered below with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastgen.model import ModelError
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.config.huggingface_families import FAMILIES
from fastgen.model.config.unsupported_fields import UNSUPPORTED
from support.tiny_models import SIZES, TINY, Tiny

_TRAINING = "used only in training"
_RETURNED = "what a call in Python returns, not its values"
_LABELS = "of classifiers"
_LAYOUT = "how transformers computes, not what"
_TOKEN = "of the tokenizer or of training; the engine neither pads nor adds tokens by it"
_MAMBA = "of Mamba layers, which are rejected"
_WEIGHTS = "the tensors of the file decide, and one that nothing reads is rejected"
# Why fields of native families change no number, besides those that the tests below show to be honoured.
WITHOUT_EFFECT = {
    "architectures": "the class only; another one is rejected or run by transformers",
    "transformers_version": "a note",
    "output_hidden_states": _RETURNED,
    "output_attentions": _RETURNED,
    "output_router_logits": _RETURNED,
    "return_dict": _RETURNED,
    "dtype": "--dtype selects the type; weights in any floating-point type are read",
    "torch_dtype": "see dtype",
    "chunk_size_feed_forward": _LAYOUT,
    "attn_implementation": _LAYOUT,
    "experts_implementation": _LAYOUT,
    "pretraining_tp": _LAYOUT,
    "use_cache": _LAYOUT,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "num_labels": _LABELS,
    "problem_type": _LABELS,
    "initializer_range": _TRAINING,
    "attention_dropout": _TRAINING,
    "embd_pdrop": _TRAINING,
    "resid_pdrop": _TRAINING,
    "residual_dropout": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "name_or_path": "a note",
    "num_mtp_layers": "layers that draft tokens are not used",
    "mamba_n_heads": _MAMBA,
    "mamba_n_groups": _MAMBA,
    "mamba_d_state": _MAMBA,
    "mamba_d_head": _MAMBA,
    "mamba_d_conv": _MAMBA,
    "mamba_expand": _MAMBA,
    "mamba_chunk_size": _MAMBA,
    "mamba_conv_bias": _MAMBA,
    "mamba_proj_bias": _MAMBA,
    "time_step_limit": _MAMBA,
}
# Fields that transformers reads although its classes do not declare them.
UNDECLARED: dict[str, Any] = {
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_theta": 6e5,
    "rope_local_base_freq": 5e5,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"sliding_window": 4}},
    "transformers_weights": "other.safetensors",
    "is_causal": False,
    "torch_dtype": "float16",
    "num_labels": 3,
    "output_attentions": True,
    "attn_implementation": "sdpa",
    "experts_implementation": "grouped_mm",
    "name_or_path": "other",
}
UNDECLARED_OF: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 3, "rope_local_base_freq": 5e5},
    "gemma4_text": {"rope_theta": None, "global_head_dim": 40, "num_global_key_value_heads": 1},
    "gemma4_unified_text": {"rope_theta": None, "global_head_dim": 40, "num_global_key_value_heads": 1},
    "mixtral": {"num_experts": 3},
    "glm": {"partial_rotary_factor": 0.25},
    "glm4_moe": {"partial_rotary_factor": 0.25, "num_local_experts": 7},
    "minimax_m2": {
        "partial_rotary_factor": 0.25,
        "num_experts": 3,
        "rotary_dim": 4,
        "use_qk_norm": False,
        "scoring_func": "softmax",
    },
    "glm4": {"partial_rotary_factor": 0.25},
    # As in Gemma 4, no effect: rope_parameters, also the default ones, have a base.
    "ministral3": {"rope_theta": None},
    "qwen3_moe": {"num_local_experts": 3},
    "olmoe": {"num_local_experts": 3},
}
VALUES: dict[str, Any] = {
    "model_type": "gpt2",
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "eos_token_id": 9,
    "bos_token_id": 9,
    "pad_token_id": 9,
    "head_dim": 48,
    "num_key_value_heads": 1,
    "num_attention_heads": 3,
    "sliding_window": 11,
    "attn_logit_softcapping": 7.0,
    "final_logit_softcapping": 7.0,
    "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"},
    "mlp_only_layers": [0],
    "moe_layers": [0],
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "dtype": "float16",
    "transformers_version": "5.0.0",
    "architectures": None,
    "use_bidirectional_attention": True,
    "num_experts": 3,
    "num_local_experts": 3,
    "no_rope_layers": [0, 0, 1],
    "position_embedding_type": "nope",
    "time_step_limit": [0.0, 1.0],
}


_SHARED = {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 5, "attention_k_eq_v": True}
# Settings with which all fields of a family matter.
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4_text": _SHARED
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    "gemma4_unified_text": _SHARED | {"rope_parameters": None},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8},
    "mixtral": {"sliding_window": 8},
    "granitemoehybrid": {"num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 8},
}


def config_of(family: str) -> dict[str, Any]:
    """Return a config.json of the family, with windows, as transformers 5 saves it."""
    named = {"mistral": "mistral-window", "phi3": "phi3-longrope"}
    name = named.get(family, family.replace("_", "-"))
    tiny: Tiny = TINY[name if name in TINY else name.removesuffix("-text")]
    settings = {**SIZES, **tiny.settings, **_SETTINGS.get(family, {})}
    config = tiny.config_class(**settings, architectures=[f"{tiny.family}ForCausalLM"])
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return saved


def old_config_of(family: str) -> dict[str, Any]:
    """Return it without the lists and objects in which transformers 5 saves what has other names, too."""
    newer = ("layer_types", "rope_parameters", "no_rope_layers", "per_layer_config", "moe_layers")
    older = {"layer_types": ["attention"] * 3} if family == "granitemoehybrid" else {}
    return {name: value for name, value in config_of(family).items() if name not in newer} | older


def other_value(name: str, value: Any) -> Any:
    """Return a value of the field that is neither the given one nor the default."""
    if name == "layer_types":
        return (
            ["full_attention"] * 3
            if value is None
            else ["sliding_attention" if kind == "full_attention" else "full_attention" for kind in value]
        )
    if name in VALUES:
        return VALUES[name]
    if isinstance(value, bool) or value is None:
        return not value
    assert isinstance(value, int | float), f"no other value is known for {name}"
    return value + 1 if isinstance(value, int) else value * 1.5 or 0.1


def outcome(config: dict[str, Any], name: str) -> ModelArchitecture | None:
    """Return the architecture, or None if it is rejected with a message that names the field."""
    try:
        return architecture_from_huggingface(config, None)
    except ModelError as error:
        message = str(error)
    assert re.search(_WORDS.get(name, name), message), f"{name} is rejected without its name: {message}"
    return None


# Messages of checks that GGUF files share.
_WORDS = {
    "num_key_value_heads": "key-value heads",
    "num_attention_heads": "attention heads|short_factor",
    "num_experts_per_tok": "experts per token",
}


def fields_of(family: str) -> dict[str, Any]:
    """Return the fields that transformers' class declares, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[family])}


def undeclared(family: str) -> dict[str, Any]:
    fields = UNDECLARED | UNDECLARED_OF.get(family, {})
    return {name: value for name, value in fields.items() if value is not None}


FIELDS = [
    (family, name) for family in FAMILIES for name in sorted(fields_of(family).keys() | undeclared(family).keys())
]


@pytest.mark.parametrize(("family", "name"), FIELDS)
def test_a_field_is_honoured_or_rejected_by_name_or_known_to_change_nothing(family: str, name: str) -> None:
    is_honoured = []
    for config in (config_of(family), old_config_of(family)):
        value = undeclared(family)[name] if name in undeclared(family) else other_value(name, config.get(name))
        assert config.get(name) != value
        is_honoured.append(outcome(config | {name: value}, name) != architecture_from_huggingface(config, None))
    assert any(is_honoured) is (name not in WITHOUT_EFFECT), f"{family}: {name}"


def test_every_reason_is_of_a_field_that_exists() -> None:
    assert WITHOUT_EFFECT.keys() <= {name for _, name in FIELDS}


def default_of(family: str, name: str) -> Any:
    """Return the default of transformers' class, of which rotary parameters are in an object."""
    cls = CONFIG_MAPPING[family]
    rope = cls().rope_parameters
    if name == "rope_parameters":
        stated = FAMILIES[family].defaults[name]
        return {key: value for key, value in rope.items() if key != "rope_theta" or key in stated}
    if name == "rope_theta":  # of a file with rope_parameters that lack it, if these have a default
        is_whole = "rope_parameters" in FAMILIES[family].defaults
        return cls.default_theta if is_whole else rope.get("full_attention", rope)["rope_theta"]
    if name == "partial_rotary_factor":
        return rope[name]
    if name == "global_head_dim":
        return cls().per_layer_config["full_attention"].head_dim
    if name == "rope_local_base_freq":
        return rope["sliding_attention"]["rope_theta"]
    return fields_of(family)[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_a_file_leaves_out_have_the_defaults_of_transformers(family: str) -> None:
    ours = FAMILIES[family].defaults
    assert ours == {name: default_of(family, name) for name in ours}


# Sizes must be stated. The tokenizer's end token is used where a file states none.
STATED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "eos_token_id",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_changes_the_model_has_a_default_or_must_be_stated(family: str) -> None:
    config = config_of(family)
    before = architecture_from_huggingface(config, None)
    for field in dataclasses.fields(CONFIG_MAPPING[family]):
        value = other_value(field.name, config.get(field.name))
        if field.name in STATED or outcome(config | {field.name: value}, field.name) in (None, before):
            continue
        others = {"num_local_experts"} if field.name == "num_experts" else set()
        without = {name: entry for name, entry in config.items() if name not in {field.name, *others}}
        stated = without | {field.name: field.default}
        assert outcome(without, field.name) == outcome(stated, field.name), field.name


# Rope types that read a parameter. In other types transformers ignores it too.
READ_BY: dict[str, tuple[str, ...]] = {
    "factor": ("linear", "llama3", "yarn", "longrope"),
    "original_max_position_embeddings": ("llama3", "yarn", "longrope"),
    "attention_factor": ("yarn", "longrope"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
    "mrope_section": (),  # sections of images' positions; those of a text are equal in all sections
}
ROPE: dict[str, Any] = {
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OTHER_ROPE: dict[str, Any] = {
    "rope_type": "linear",
    "partial_rotary_factor": 0.5,
    "attention_factor": 0.7,
    "beta_fast": 30,
    "beta_slow": 2,
    "truncate": False,
    "mscale": 2.0,
    "mscale_all_dim": 2.0,
    "mrope_section": [4, 2, 2],
    "short_factor": [1.5] * 8,
    "long_factor": [2.5] * 8,
}


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("name", RopeParameters.__annotations__)
def test_a_rope_parameter_is_honoured_by_the_types_that_read_it(kind: str, name: str) -> None:
    config = config_of("llama")
    parameters = ROPE | {"rope_type": kind}
    before = architecture_from_huggingface(config | {"rope_parameters": parameters}, None)
    value = (
        OTHER_ROPE[name]
        if name in OTHER_ROPE
        else parameters[name] * 1.25
        if name != "original_max_position_embeddings"
        else 80
    )
    if value == parameters.get(name):
        value = "default"
    after = outcome(config | {"rope_parameters": parameters | {name: value}}, name)
    if name in READ_BY:
        assert (after != before) is (kind in READ_BY[name])
    else:
        assert after != before


# Words in the names of fields that are factors, bounds or switches in a decoder's arithmetic.
ARITHMETIC = re.compile(
    "alibi|bidirectional|causal|clip|cap(ping)?$|chunk|interleave|limit|logit|multiplier|mup|norm$|parallel|"
    "partial_rotary|prefix_lm|rope|rotary|scal(e|ing)|scoring|selection_fn|swiglu|temperature|topk|tuning"
)
# Why others of such names are not in the table of rejected fields.
NOT_REJECTED = {
    "the native reader reads it": ("rope_scaling", "rope_theta"),
    "a size or choice of layers: the tensors decide": (
        "block_ffn_dim_multiplier",
        "num_ln_in_parallel_attn",
        "qk_rope_head_dim",
    ),
    "how or whether something is computed, not what": (
        "chunk_size_lm_head",
        "max_inference_chunksize",
        "num_logits_to_keep",
        "scale_attention_softmax_in_fp32",
    ),
    "of training or initialisation": (
        "mtp_loss_scaling_factor",
        "rescale_prenorm_residual",
        "time_step_scale",
        "w_init_variance_scale",
    ),
    "of norms, adapters, indexers, encoders, state spaces or hashing, which have tensors of their own": (
        "_remove_final_layer_norm",
        "adapter_layer_norm",
        "adapter_reuse_layer_norm",
        "add_out_norm",
        "altup_coef_clip",
        "altup_correct_scale",
        "apply_residual_connection_post_layernorm",
        "audio_chunk_size",
        "chain_hidden_post_norm",
        "chunk_size",
        "chunkwise_kernel",
        "compress_rope_theta",
        "index_topk",
        "index_topk_blocks",
        "local_attn_chunk_length",
        "local_num_chunks_after",
        "local_num_chunks_before",
        "lsh_attn_chunk_length",
        "lsh_num_chunks_after",
        "lsh_num_chunks_before",
        "mamba_rms_norm",
        "moe_topk",
        "pre_norm",
        "rel_l2_clip_threshold",
        "rescale_every",
        "rotary_value",
        "ssm_in_multiplier",
        "ssm_multipliers",
        "ssm_out_multiplier",
        "use_mem_rope",
    ),
}


def test_factors_and_switches_of_other_families_are_rejected_in_native_ones() -> None:
    native = {name for family in FAMILIES for name in fields_of(family)}
    others = {
        name
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind in CONFIG_MAPPING and dataclasses.is_dataclass(CONFIG_MAPPING[kind])
        for name in fields_of(kind)
    }
    found = {name for name in others - native if ARITHMETIC.search(name)}
    explained = {name for names in NOT_REJECTED.values() for name in names}
    assert found - UNSUPPORTED.keys() == explained


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_of_another_family_is_rejected_by_name_unless_it_changes_nothing(name: str) -> None:
    family = next((family for family in FAMILIES if name not in FAMILIES[family].defaults | fields_of(family)), "llama")
    config = {key: value for key, value in config_of(family).items() if key != name}
    before = architecture_from_huggingface(config, None)
    assert outcome(config | {name: 0.7}, name) is None
    assert outcome(config | {name: None}, name) == before
    for neutral in UNSUPPORTED[name]:
        assert outcome(config | {name: neutral}, name) == before


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"rms_norm_eps": None, "norm_eps": 1e-5}, "norm_eps is set, but models of type llama have rms_norm"),
        ("mistral", {"hidden_act": None, "activation_function": "silu"}, "activation_function is set"),
        ("gemma2", {"hidden_activation": None, "hidden_act": "gelu"}, "hidden_act is set"),
        ("qwen2", {"max_position_embeddings": None, "n_positions": 99}, "n_positions is set"),
        ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        (
            "llama4_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "rope_type is yarn: models of type llama4_text are not supported",
        ),
        ("llama", {"no_rope_layers": "x"}, "no_rope_layers"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 3}, "layer_types differs from sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has 'full_attention'"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters is"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
    ],
)
def test_a_field_under_another_name_or_in_another_place_is_rejected(
    family: str, changes: dict[str, Any], words: str
) -> None:
    config = {name: value for name, value in (config_of(family) | changes).items() if value is not None}
    with pytest.raises(ModelError, match=words):
        architecture_from_huggingface(config, None)


def test_other_names_beside_the_field_itself_change_nothing() -> None:
    config = config_of("llama")
    others = {"norm_eps": 1e-3, "activation_function": "relu", "n_positions": 7, "no_rope_layers": [1, 1, 1]}
    assert architecture_from_huggingface(config | others, None) == architecture_from_huggingface(config, None)
