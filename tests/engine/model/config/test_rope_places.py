"""Rotary positions from every place where config.json may describe them, and from two that disagree."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from fastgen.model import ModelError
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.config.rope import YarnScaling
from fastgen.model.layers.rope import Rope
from support.tiny_models import SIZES

GPT_OSS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
FULL_AND_SLIDING = {
    "full_attention": {"rope_type": "default", "rope_theta": 7e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 5e5}),
    ("llama", {"rope_scaling": LINEAR}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": LINEAR | {"rope_theta": 5e5}}),
    ("llama", {"rope_parameters": LINEAR, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": LINEAR | {"rope_theta": 2e4}, "rope_theta": 5e5}),
    # both: rope_scaling replaces rope_parameters whole, its base included
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_theta": 2e4}),
    ("llama", {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_theta": 5e5}}),
    ("llama", {"rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    ("llama", {"rope_scaling": LLAMA3 | {"rope_theta": 2e4}, "rope_parameters": LINEAR}),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": LINEAR}),
    # null: the factor follows from the lengths
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
    ),
    ("llama", {"rope_parameters": GPT_OSS | {"truncate": None, "beta_fast": None, "beta_slow": None, "mscale": None}}),
    ("mixtral", {}),
    ("qwen3", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("phi3", {"rope_parameters": LONG}),
    ("phi3", {"rope_parameters": LONG | {"original_max_position_embeddings": 64}}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    (
        "phi3",
        {"rope_scaling": LONG | {"rope_type": "su", "original_max_position_embeddings": 64}, "rope_parameters": LINEAR},
    ),
    ("phi3", {"partial_rotary_factor": 0.75}),
    ("smollm3", {}),
    ("seed_oss", {"rope_scaling": LINEAR}),
    ("granite", {"rope_theta": 5e5}),
    (
        "granitemoehybrid",
        {"rope_scaling": LINEAR, "layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
    ),
    ("ernie4_5", {}),
    ("glm4", {}),
    ("glm4", {"partial_rotary_factor": 0.25}),
    ("glm4", {"rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.75}}),
    ("minimax_m2", {}),
    ("minimax_m2", {"rotary_dim": 8}),
    ("minimax_m2", {"rotary_dim": 8, "partial_rotary_factor": 0.75}),
    ("glm4_moe", {}),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_theta": 6e5}),
    ("gpt_oss", {"rope_theta": 6e5, "rope_scaling": GPT_OSS}),
    ("gpt_oss", {"rope_parameters": {**GPT_OSS, "rope_theta": 6e5}}),
    ("ministral3", {}),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("olmo3", {}),
    ("olmo3", {"rope_theta": 2e4}),
    ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}}),
    ("olmo3", {"rope_parameters": FULL_AND_SLIDING}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"rope_parameters": FULL_AND_SLIDING}),
    ("gemma3_text", {"rope_parameters": FULL_AND_SLIDING, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
]


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_factor_that_transformers_requires_must_be_stated(kind: str) -> None:
    parameters = {name: value for name, value in LLAMA3.items() if name != "factor"} | {"rope_type": kind}
    config = {"model_type": "llama", **SIZES, "head_dim": 16, "rope_parameters": parameters}
    with pytest.raises(KeyError, match="factor"):
        CONFIG_MAPPING["llama"].from_dict(json.loads(json.dumps(config)))
    with pytest.raises(ModelError, match="factor is missing from the model's configuration"):
        architecture_from_huggingface(config, None)


@pytest.mark.parametrize(
    ("fields", "magnitude"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.9, "apply_yarn_scaling": False}, 0.9),
        ({"attn_factor": 0.9, "attention_factor": 1.25}, 1.25),
        ({"extrapolation_factor": 1.0}, 0.1 * math.log(4) + 1),
    ],
)
def test_factors_of_yarn_that_only_vllm_reads_are_honoured(fields: dict[str, Any], magnitude: float) -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **fields}
    config = {"model_type": "llama", **SIZES, "head_dim": 16, "rope_scaling": parameters}
    (rope,) = architecture_from_huggingface(config, None).rope_configs
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == pytest.approx(magnitude)


def test_yarn_with_another_extrapolation_factor_is_rejected() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}
    config = {"model_type": "llama", **SIZES, "head_dim": 16, "rope_scaling": parameters}
    with pytest.raises(ModelError, match=r"extrapolation_factor is 0\.5: YaRN is only supported with 1"):
        architecture_from_huggingface(config, None)


@pytest.mark.parametrize(("family", "form"), FORMS, ids=str)
def test_angles_equal_transformers(family: str, form: dict[str, Any]) -> None:
    sizes = SIZES | {"head_dim": 16, "sliding_window_pattern": 2}
    if family == "olmo3":
        sizes["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    config = json.loads(json.dumps({"model_type": family, **sizes, **form}))
    ropes = architecture_from_huggingface(config, None).rope_configs
    theirs = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(config)))
    positions = torch.arange(40)
    expected = []
    if family in ("gemma3_text", "olmo3"):
        embedding: Any = (Gemma3RotaryEmbedding if family == "gemma3_text" else Olmo3RotaryEmbedding)(theirs)
        kinds = [{"layer_type": "full_attention"}, {"layer_type": "sliding_attention"}]
        expected = [embedding(torch.zeros(1), positions[None], **kind)[0] for kind in kinds]
    else:
        cls: Any = {
            "phi3": Phi3RotaryEmbedding,
            "glm4": Glm4RotaryEmbedding,
            "glm4_moe": Glm4RotaryEmbedding,
            "minimax_m2": MiniMaxM2RotaryEmbedding,
            "gpt_oss": GptOssRotaryEmbedding,
        }.get(family, LlamaRotaryEmbedding)
        expected = [cls(theirs)(torch.zeros(1), positions[None])[0]]
        if family == "smollm3":
            expected.append(torch.ones_like(expected[0]))  # layers without positions
    for rope, cosines in zip(ropes, expected, strict=True):
        ours, _ = Rope(rope, longest=40)(positions)
        torch.testing.assert_close(ours, cosines[0, :, : ours.shape[1]], atol=1e-6, rtol=0)
