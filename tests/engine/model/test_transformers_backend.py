"""Models run by transformers' code: logits within 1e-4, equal greedy tokens, unsupported models rejected by name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedModel,
)

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model import ModelError
from fastgen.model.layers.torch_attention import TorchPagedAttention
from fastgen.model.source import ModelSource
from fastgen.model.transformers_backend.load import load_transformers_model
from fastgen.model.transformers_backend.model import TransformersModel
from fastgen.runner.device import run_first_steps
from fastgen.runner.loader import host_runner, load_runner, with_cache
from fastgen.runner.runner import ModelRunner
from fastgen.settings import ConfigError, EngineConfig
from support.driving import FewBlocks, execute, generate, run_in_chunks, sequence

pytestmark = pytest.mark.slow  # together over ten seconds

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # sharp logits expose a wrong computation
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
GATED = {"intermediate_size": 80, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "opt, norms behind": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    "falcon, one key-value head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi-2": ("phi", {"intermediate_size": 80, "partial_rotary_factor": 0.5}),
    "gpt-2": ("gpt2", {"n_inner": 80}),
    "gpt-neox": ("gpt_neox", {"intermediate_size": 80, "rotary_pct": 0.25}),
    "gpt-bigcode": ("gpt_bigcode", {"n_inner": 80}),
    "stablelm": ("stablelm", {**GATED, "use_qkv_bias": True}),
    "starcoder2, window": ("starcoder2", {**GATED, "sliding_window": 9}),
    "olmo-2": ("olmo2", GATED),
    "cohere": ("cohere", {**GATED, "logit_scale": 0.25}),
    "cohere-2, windows in some layers": ("cohere2", {**GATED, "head_dim": 8, "sliding_window": 9}),
    "granite": ("granite", {**GATED, "logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "gpt-oss, sinks and windows": (
        "gpt_oss",
        {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 9}
        | {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma-2, softcaps": ("gemma2", {**GATED, "head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 4.0}),
    "olmoe": ("olmoe", {**GATED, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2, values narrower than keys": (
        "deepseek_v2",
        {"intermediate_size": 80, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {**EXPERTS, "num_key_value_heads": 6, "head_dim": 8},
    ),
    "llama": ("llama", GATED),
}


def random_model(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES | settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start constant, which would hide a missing one
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def adapted(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return load_transformers_model(folder, device=torch.device("cpu"), dtype=dtype, progress=lambda _fraction: None)


def runner_of(folder: Path) -> ModelRunner:
    return with_cache(adapted(folder), EngineConfig(model="", kv_cache_memory=4 << 20, block_size=16), host_runner)


def tokens_of(length: int) -> list[int]:
    return random.Random(length).choices(range(8, 211), k=length)


@pytest.fixture(scope="module", params=ZOO)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """transformers' model, and a runner over its saved weights."""
    model = random_model(*ZOO[request.param])
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, runner_of(folder)


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_logits_equal_transformers_for_any_chunking_of_a_prompt(
    pair: tuple[PreTrainedModel, ModelRunner],
) -> None:
    model, runner = pair
    tokens = tokens_of(75)
    expected = expected_logits(model, tokens)[-1]
    blocks = random.Random(1).sample(range(runner.num_blocks), -(-len(tokens) // 16))
    for sizes in ([75], [1, 30], [7, 1, 33], [64]):
        logits = run_in_chunks(runner, tokens, blocks, sizes)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5, msg=f"chunks of {sizes}")


def test_greedy_tokens_equal_transformers_when_batched_preempted_and_prefix_cached(
    pair: tuple[PreTrainedModel, ModelRunner],
) -> None:
    model, runner = pair
    shared = tokens_of(33)
    prompts = [*(tokens_of(length) for length in (1, 2, 16, 17, 40)), shared, [*shared, 9, 10], shared]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    # Sequences of up to 52 tokens share five blocks of 16: some are preempted.
    outcome = generate(FewBlocks(runner, num_blocks=5), prompts, sampling, token_budget=19, at_once=5)
    assert outcome.preemptions > 0
    for prompt, output in zip(prompts, outcome.tokens, strict=True):
        logits = expected_logits(model, prompt + output[:-1])[len(prompt) - 1 :]
        assert output == logits.argmax(-1).tolist()
    one_by_one = generate(runner, prompts[-3:], sampling, token_budget=19, at_once=1)
    assert one_by_one.cached == [0, 32, 32]
    assert one_by_one.tokens == outcome.tokens[-3:]


def test_a_model_that_is_not_native_is_adapted_and_returns_prompt_logprobs(tmp_path: Path) -> None:
    model = random_model(*ZOO["phi-2"])
    model.save_pretrained(tmp_path)
    source = ModelSource.open(str(tmp_path))
    assert source.native is None
    config = EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_memory=4 << 20, block_size=16)
    runner = load_runner(source, config, lambda _stage, _fraction: None)
    prompt = tokens_of(100)
    scored = sequence(prompt, list(range(7)), sampling=SamplingParams(temperature=0, prompt_logprobs=3))
    unscored = sequence(prompt[:9], [8])
    first = execute(runner, StepPlan((Chunk(unscored, 0, 9), Chunk(scored, 0, 70))))
    scored.num_computed_tokens = 70
    second = execute(runner, StepPlan((Chunk(scored, 70, 30),)))
    found = first.prompt_logprobs[1] + second.prompt_logprobs[0]
    assert (list(first.prompt_logprobs), list(second.prompt_logprobs), len(second.token_ids)) == ([1], [0], 1)
    assert [entry.token_id for entry in found] == prompt[1:]
    expected = expected_logits(model, prompt).log_softmax(-1)
    own = expected[:-1].gather(-1, torch.tensor(prompt[1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor([entry.logprob for entry in found]), own, atol=1e-4, rtol=0)
    likeliest = expected[:-1].topk(3)
    assert [[token for token, _ in entry.top] for entry in found] == likeliest.indices.tolist()


def test_a_missing_gpu_is_an_error_without_fallback(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(model=str(gpt2), device="cuda")
    with pytest.raises(ConfigError, match=r"--device cuda: .* GPU|CUDA.*: run on a machine with a GPU"):
        load_runner(ModelSource.open(str(gpt2)), config, lambda _stage, _fraction: None)


def test_the_first_step_has_the_token_budget_and_samples_every_sequence(gpt2: Path) -> None:
    model = adapted(gpt2)
    rows: list[int] = []
    run, head = model.forward, model.head
    model.forward = lambda step, cache: rows.append(step.num_rows) or run(step, cache)  # type: ignore[func-returns-value,method-assign]
    model.head = lambda hidden: rows.append(len(hidden)) or head(hidden)  # type: ignore[func-returns-value,method-assign]
    run_first_steps(model, EngineConfig(model="", token_budget=128, max_sequences=40, block_size=16), host_runner)
    assert rows[:2] == [128, 40]
    rows.clear()
    run_first_steps(model, EngineConfig(model="", token_budget=4096, max_sequences=40, block_size=16), host_runner)
    assert rows[:2] == [4096, 40]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    random_model(*ZOO["gpt-2"]).save_pretrained(tmp_path)
    return tmp_path


def test_the_shape_comes_from_the_layers_and_the_configuration(gpt2: Path) -> None:
    runner = runner_of(gpt2)
    assert runner.architecture.name == "gpt2"
    assert (runner.architecture.vocab_size, runner.architecture.eos_token_ids) == (211, {5})
    assert (runner.device, runner.dtype, runner.max_model_length) == ("cpu", "float32", 256)
    assert runner.num_parameters == random_model(*ZOO["gpt-2"]).num_parameters()


def test_the_tokenizers_end_token_ends_generations(gpt2: Path) -> None:
    tokens = {"11": {"content": "<e>", "special": True}}
    (gpt2 / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "added_tokens_decoder": tokens}))
    assert runner_of(gpt2).architecture.eos_token_ids == {5, 11}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_halves_the_bytes_of_a_cache_block(gpt2: Path, dtype: torch.dtype) -> None:
    model = adapted(gpt2, dtype)
    config = EngineConfig(model="", kv_cache_memory=1 << 20, block_size=16)
    runner = with_cache(model, config, host_runner)
    assert runner.dtype == str(dtype).removeprefix("torch.")
    assert runner.num_blocks // 2 == with_cache(adapted(gpt2), config, host_runner).num_blocks
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outcome = generate(runner, [tokens_of(20), tokens_of(3)], sampling, token_budget=8, at_once=2)
    assert [len(tokens) for tokens in outcome.tokens] == [5, 5]


def test_dynamic_rope_is_served_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    random_model("llama", {**GATED, "rope_parameters": rope}).save_pretrained(tmp_path)
    assert runner_of(tmp_path).max_model_length == 64


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("bloom", {"n_head": 6, "n_layer": 2}, "BloomForCausalLM cannot be served: its code"),
        ("gptj", {"rotary_dim": 4}, "GPTJForCausalLM cannot be served: its code"),
        ("falcon", {"alibi": True, "new_decoder_architecture": False}, "cannot be served: it needs alibi positions"),
        (
            "llama4_text",
            {**GATED, "intermediate_size_mlp": 80, "head_dim": 8, "num_local_experts": 2},
            "attention_chunk_size",
        ),
        (
            "bart",
            {"d_model": 48, "decoder_layers": 1, "encoder_layers": 1},
            "takes no position_ids",
        ),
    ],
)
def test_an_unsupported_architecture_is_rejected_by_name(
    tmp_path: Path, kind: str, settings: dict[str, Any], words: str
) -> None:
    random_model(kind, settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        adapted(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_self_check_rejects_a_model_with_other_logits(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchPagedAttention, "store", lambda *_: None)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel cannot be served: it needs .* logits are off by"):
        adapted(gpt2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2ForSequenceClassification"]}, "only GPT2LMHeadModel is supported"),
        ({"model_type": "nonesuch"}, "does not describe a decoder that transformers implements"),
        ({"n_layer": 4}, r"tensor transformer\.h\.3\.\S+ is missing"),
    ],
)
def test_a_faulty_folder_is_rejected_with_the_reason(gpt2: Path, changes: dict[str, Any], words: str) -> None:
    path = gpt2 / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=words):
        adapted(gpt2)


def test_weights_that_are_not_safetensors_are_rejected(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").rename(gpt2 / "pytorch_model.bin")
    with pytest.raises(ModelError, match="weights cannot be read"):
        adapted(gpt2)


@pytest.mark.parametrize("error", [AssertionError("no"), ImportError("No module named 'x'\nhint"), ZeroDivisionError()])
@pytest.mark.parametrize("place", ["probe", "self-check", "shape"])
def test_a_model_whose_code_fails_is_rejected_by_name_with_the_cause(
    place: str, error: Exception, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(place, error, monkeypatch)
    with pytest.raises(ModelError, match=rf"GPT2LMHeadModel cannot be served: .* {type(error).__name__} \(") as caught:
        adapted(gpt2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal address")]
)
@pytest.mark.parametrize("place", ["weights", "probe", "self-check"])
def test_an_error_of_the_device_is_not_blamed_on_the_model(
    place: str, error: Exception, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(place, error, monkeypatch)
    with pytest.raises(type(error)) as caught:
        adapted(gpt2)
    assert caught.value is error


def fail_at(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model's code raise an error when it is read, called for the first time, or by the self-check."""

    def fail(*_arguments: object, position_ids: object = None, **_others: object) -> None:  # noqa: ARG001 (looked for)
        raise error

    if place == "weights":
        monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", fail)
    elif place == "shape":
        monkeypatch.setattr(GPT2Config, "sliding_window", property(fail), raising=False)
    else:
        monkeypatch.setattr(GPT2Model if place == "probe" else GPT2LMHeadModel, "forward", fail)
