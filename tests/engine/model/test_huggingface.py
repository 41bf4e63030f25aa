"""Hugging Face directories written by transformers: head shapes, checkpoints and rejected models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from fastgen.core.sampling_params import SamplingParams
from fastgen.model import ModelError
from fastgen.model.source import ModelSource
from support.driving import generate, load, run_in_chunks

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # sharp logits expose a wrong computation
    "eos_token_id": [5, 7],
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
VARIANTS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "groups of 3, head size 8": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "tied head": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "no grouping, llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL | {"num_key_value_heads": 6}, rope_parameters=LLAMA3),
    ),
    "head size beside hidden size": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL | {"num_attention_heads": 8, "num_key_value_heads": 1}, head_dim=16),
    ),
    "mistral without window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
}


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_model(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    return kind(config).eval()


def tokens_of(length: int) -> list[int]:
    return random.Random(length).choices(range(8, 211), k=length)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_any_chunking_of_a_prompt(tmp_path: Path, variant: str, block_size: int) -> None:
    kind, config = VARIANTS[variant]
    model = random_model(kind, config)
    runner = load(save(model, tmp_path), kv_cache_memory=8 << 20, block_size=block_size)
    tokens = tokens_of(197)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    blocks = random.Random(1).sample(range(runner.num_blocks), -(-len(tokens) // block_size))
    for sizes in ([197], [64], [1], [7, 1, 33], [96, 100, 1]):
        logits = run_in_chunks(runner, tokens, blocks, sizes)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, msg=f"chunks of {sizes}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_for_batched_prompts(tmp_path: Path, variant: str) -> None:
    kind, config = VARIANTS[variant]
    model = random_model(kind, config)
    runner = load(save(model, tmp_path), kv_cache_memory=8 << 20, block_size=16)
    prompts = [tokens_of(length) for length in (1, 2, 15, 16, 17, 40, 100)]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outcome = generate(runner, prompts, sampling, token_budget=19, at_once=4)
    for prompt, output in zip(prompts, outcome.tokens, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert output == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sharded_half_precision_checkpoints_load_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model(*VARIANTS["groups of 3, head size 8"]).to(dtype)
    runner = load(save(model, tmp_path, max_shard_size="40KB"), kv_cache_memory=8 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.inference_mode():
        # Load it again, because `model` has rounded its rotary frequencies too.
        anew = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        expected = anew(torch.tensor([tokens_of(30)])).logits[0, -1]
    logits = run_in_chunks(runner, tokens_of(30), [3], [30])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


END = {"content": "<e>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ends"),
    [
        ([5, 7], None, {}, {5, 7}),
        (5, [9], {}, {9}),  # as transformers: generation_config.json replaces it
        (5, {}, {}, {5}),
        (5, [9], {"eos_token": "<e>", "added_tokens_decoder": {"11": END}}, {9, 11}),  # as vLLM: the tokenizer adds one
        (None, None, {"eos_token": "<e>", "added_tokens_decoder": {"11": END}}, {11}),
        (None, None, {"added_tokens_decoder": {"11": END}}, set()),
        ([5, -1, 10**9], None, {}, {5}),  # ids that are no tokens
    ],
)
def test_end_tokens_come_from_three_files(
    folder: Path, config: Any, generation: Any, tokenizer: dict[str, Any], ends: set[int]
) -> None:
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"eos_token_id": config}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        ids = {} if generation == {} else {"eos_token_id": generation}
        (folder / "generation_config.json").write_text(json.dumps(ids))
    assert ModelSource.open(str(folder)).architecture.eos_token_ids == ends


@pytest.mark.parametrize("damaged", ["</s>", [[2]], True, 2.5, {"id": 2}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_damaged_end_tokens_are_rejected_by_name(folder: Path, family: str, file: str, damaged: Any) -> None:
    edit_config(folder, model_type=family, architectures=None)
    described = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(described | {"eos_token_id": damaged}))
    with pytest.raises(ModelError, match=rf": {file}: eos_token_id is .*expected an integer or a list of") as caught:
        ModelSource.open(str(folder))
    assert str(caught.value).count(".json") == 1, "the other file is not at fault"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model(*VARIANTS["groups of 3, head size 8"]), tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type is 't5': encoder-decoder models"),
        ({"model_type": "phi4_multimodal", "vision_config": {}}, "model_type is 'phi4_multimodal' with vision_config"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "awq"}}, "quantised weights are not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"quantization_config": {"quant_method": "hqq"}}, "config.json: quantization_config.quant_method is 'hqq'"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type is 'proportional'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
    ],
)
def test_unsupported_configurations_are_rejected_by_field(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=words) as caught:
        ModelSource.open(str(folder))
    assert "\n" not in str(caught.value)


def test_a_sliding_window_as_long_as_the_model_is_dropped(folder: Path) -> None:
    edit_config(folder, sliding_window=512)
    assert ModelSource.open(str(folder)).architecture.max_position_embeddings == 512


def test_a_head_size_that_the_kernels_do_not_support_is_rejected(tmp_path: Path) -> None:
    folder = save(random_model(LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=6)), tmp_path)
    with pytest.raises(ModelError, match="head size 6: on a CPU it must be a multiple of 4"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=96)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight has shape \(80, 48\)"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"layers\.3\.\S+ is missing"):
        load(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"layers\.2\.\S+ is not part of"):
        load(folder)


def test_missing_config_missing_path_and_missing_weights_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        ModelSource.open(str(tmp_path / "nothing"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelSource.open(str(folder))
