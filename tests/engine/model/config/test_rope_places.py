"""Rotary positions from every place where config.json may describe them, and from two that disagree."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.layers.rope import Rope
from support.tiny_models import SIZES

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
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"rope_parameters": FULL_AND_SLIDING}),
    ("gemma3_text", {"rope_parameters": FULL_AND_SLIDING, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
]


@pytest.mark.parametrize(("family", "form"), FORMS, ids=str)
def test_angles_equal_transformers(family: str, form: dict[str, Any]) -> None:
    sizes = SIZES | {"head_dim": 16, "sliding_window_pattern": 2}
    config = json.loads(json.dumps({"model_type": family, **sizes, **form}))
    ropes = architecture_from_huggingface(config, None).rope_configs
    theirs = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(config)))
    positions = torch.arange(40)
    expected = []
    if family == "gemma3_text":
        embedding: Any = Gemma3RotaryEmbedding(theirs)
        kinds = [{"layer_type": "full_attention"}, {"layer_type": "sliding_attention"}]
        expected = [embedding(torch.zeros(1), positions[None], **kind)[0] for kind in kinds]
    else:
        cls: Any = Phi3RotaryEmbedding if family == "phi3" else LlamaRotaryEmbedding
        expected = [cls(theirs)(torch.zeros(1), positions[None])[0]]
    for rope, cosines in zip(ropes, expected, strict=True):
        ours, _ = Rope(rope, longest=40)(positions)
        torch.testing.assert_close(ours, cosines[0, :, : ours.shape[1]], atol=1e-6, rtol=0)
