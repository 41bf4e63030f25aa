"""Architectures from config.json: rejected fields, and the longest sequence."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.kv_cache.sizing import KVShape, resolve_max_model_length
from fastgen.model import ModelError
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.config.huggingface_families import is_native
from fastgen.model.native import make_ropes
from fastgen.settings import ConfigError, EngineConfig
from support.tiny_models import TINY


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    tiny = TINY[name]
    sizes = {
        "vocab_size": 157,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return {"model_type": tiny.config_class.model_type, **sizes, **tiny.settings, **changes}


def architecture(name: str, **changes: Any) -> ModelArchitecture:
    return architecture_from_huggingface(config_of(name, **changes), None)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "mistral-window",
            {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "layer_types differs from sliding_window",
        ),
        ("qwen2-windows", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "lists 2 layers, but num_hidden_layers is 3"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        ("gemma3", {"use_bidirectional_attention": True}, "only causal attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("qwen2-moe", {"num_experts_per_tok": 5}, "5 experts per token, but the layers have only 4"),
        ("qwen2-moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("glm4-moe", {"topk_group": 5}, "n_routed_experts is 8, n_group 4 and topk_group 5: expected equal groups"),
        ("glm4-moe", {"n_group": 3}, "n_group 3"),
        ("glm4-moe", {"topk_group": 1}, "topk_group 1"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm is false"),
        ("minimax-m2", {"rotary_dim": 32}, "partial_rotary_factor is 2.0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers lists 2 layers, but num_hidden_layers is 3"),
        ("ministral3", {"rope_parameters": {}}, "rope_parameters is empty"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba", "attention"]}, "layer_types has 'mamba'"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0"),
        ("granitemoehybrid", {"layer_types": None}, "layer_types is missing, so all layers are Mamba layers"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is"),
        ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "8 numbers"),
        ("llama-llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            "llama-llama3",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 1}},
            "high_freq_factor is 1.0: expected at least low_freq_factor",
        ),
        ("qwen3-yarn", {"head_dim": 31}, "odd"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: expected a number above 0"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta is inf: expected a number above 0"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps is True: expected a number above 0"),
        ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648: expected an integer of at most"),
        ("llama", {"num_hidden_layers": 4097}, "num_hidden_layers is 4097: expected an integer of at most 4096"),
    ],
)
def test_unsupported_configurations_are_rejected_by_field(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        architecture(name, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "positions", "default"),
    [
        ("llama", 256, 256),
        ("llama-linear", 128, 128),  # scaled by 4
        ("llama-dynamic", 256, 256),  # up to the original length, without scaling
        ("qwen2-yarn", 128, 128),
        ("qwen3-yarn", 256, 256),
        ("phi3-longrope-beyond", 256, 32),  # longer only if configured
        ("gemma3-linear", 256, 256),  # its configuration states the scaled length
    ],
)
def test_the_default_length_is_the_longest_with_exact_results(name: str, positions: int, default: int) -> None:
    a = architecture(name)
    assert (a.max_position_embeddings, a.default_length) == (positions, default)
    kv = KVShape(a.num_layers, a.num_kv_heads, key_dim=a.head_dim, value_dim=a.head_dim)
    assert resolve_max_model_length(EngineConfig(model=""), a, kv, 100) == default
    asked = EngineConfig(model="", max_model_length=positions)
    assert resolve_max_model_length(asked, a, kv, 100) == positions
    with pytest.raises(ConfigError, match=f"the model has {positions} positions"):
        resolve_max_model_length(EngineConfig(model="", max_model_length=positions + 1), a, kv, 100)


@pytest.mark.parametrize(
    ("name", "length", "warns"),
    [
        ("llama", 4096, False),  # beyond its positions: rejected later
        ("llama", None, False),
        ("qwen2-yarn", 4096, False),
        ("phi3-longrope-beyond", 32, False),
        ("phi3-longrope-beyond", None, False),
        ("phi3-longrope-beyond", 33, True),
    ],
)
def test_only_a_model_with_long_factors_warns_that_they_apply_to_all_requests(
    name: str, length: int | None, *, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_ropes(architecture(name), length, None)
    assert ("long rotary factors" in caplog.text) == warns


def test_a_window_as_long_as_the_model_is_dropped() -> None:
    windows = [architecture("mistral-window", sliding_window=size).layers[0].window for size in (255, 256, 4096)]
    assert windows == [255, None, None]


def test_layers_alternate_in_the_pattern_of_the_family() -> None:
    assert [layer.window for layer in architecture("gemma2").layers] == [8, None, 8]
    assert [(layer.window, layer.rope) for layer in architecture("gemma3", num_hidden_layers=4).layers] == [
        (8, 1),
        (None, 0),
        (8, 1),
        (None, 0),
    ]
    assert [layer.window for layer in architecture("qwen2-windows").layers] == [None, 8, 8]
    assert [layer.experts is None for layer in architecture("qwen2-moe-sparse").layers] == [True, False, True]


def test_parameter_counts_equal_transformers() -> None:
    names = (
        "llama-biases",
        "gemma3",
        "qwen2-moe",
        "phi3-partial",
        "mixtral",
        "qwen3",
        "olmo3",
        "glm4",
        "olmoe",
        "seed-oss",
        "granitemoe",
        "granitemoehybrid",
        "granitemoehybrid-experts",
    )
    for name in names:
        ours = architecture(name, tie_word_embeddings=name in ("llama-biases", "gemma3"))
        assert ours.num_parameters == TINY[name].build().num_parameters(), name


def test_a_family_is_native_only_with_its_own_class() -> None:
    assert is_native({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    assert is_native({"model_type": "llama"})
    assert not is_native({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})
    assert not is_native({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    assert not is_native({})
