"""Results on a device equal transformers' on the same device: chunked, batched and swapped.

All tests run on CPUs too, with the same code. On a machine with a GPU and only torch, transformers and pytest:
`PYTHONPATH=engine python -m pytest -c /dev/null --noconftest tests/gpu`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.step_output import StepOutput
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers import weight_reader
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.model.transformers_backend.load import load_transformers_model
from fastgen.model.transformers_backend.model import TransformersModel
from fastgen.runner.device import choose_device, choose_dtype, measure_gpu_cache_memory
from fastgen.runner.loader import host_runner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch that is built for it"),
]
ON_GPU = pytest.param("cuda", marks=NEEDS_GPU)
BLOCK_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160, "num_key_value_heads": 2},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 128},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt2": {"n_inner": 160},
    "starcoder2": {"intermediate_size": 160, "num_key_value_heads": 2, "sliding_window": 20},
    "gemma2": {"intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20},
}


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    return choose_device(EngineConfig(model="", device=request.param))


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | MODELS[kind])).save_pretrained(folder)
    return folder


def tokens_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 331), k=length)


def sequence_of(tokens: list[int], blocks: list[int], **sampling: Any) -> Sequence:
    request = Request(id="", prompt_token_ids=tokens, sampling=SamplingParams(temperature=0, **sampling))
    made = Sequence(request, ordinal=0, arrival=0.0, seed=0)
    made.block_table = blocks
    return made


def chunk(subject: Sequence, size: int) -> Chunk:
    return Chunk(subject, subject.num_computed_tokens, min(size, subject.num_pending_tokens))


# tests/engine/model/test_transformers_backend.py has more of them, on CPUs.
PAIRS = [
    pytest.param((device, kind), marks=NEEDS_GPU if device == "cuda" else [], id=f"{kind} on {device}")
    for device, kinds in (("cpu", ["falcon", "gemma2"]), ("cuda", [*MODELS]))
    for kind in kinds
]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """transformers' model and ours, on the device in float32."""
    on, kind = request.param
    device, folder = choose_device(EngineConfig(model="", device=on)), save(kind, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ours = load_transformers_model(folder, device=device, dtype=torch.float32, progress=lambda _fraction: None)
    return theirs.eval().to(device), ours


def runner_over(model: TransformersModel, *, num_blocks: int = 40, num_host_blocks: int = 20) -> ModelRunner:
    cache = KVCache(
        model.kv_shape,
        num_blocks,
        BLOCK_SIZE,
        num_host_blocks=num_host_blocks,
        device=model.device,
        dtype=model.cache_dtype,
    )
    return ModelRunner(model, cache, max_model_length=512)


def step_input(plan: StepPlan) -> StepInput:
    """Return the input of a hand-made plan for a runner that knows none of its sequences."""
    for part in plan.chunks:
        part.sequence.row, part.sequence.num_sent_blocks = None, 0
    return StepInputBuilder(BLOCK_SIZE).build(plan)


def execute(runner: ModelRunner, plan: StepPlan) -> StepOutput:
    ticket = runner.launch(step_input(plan))
    ticket.sample([])
    return ticket.result()


def logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    return runner.logits(step_input(plan))


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    return logits


def test_chunks_and_decodes_together_give_transformers_logits(pair: tuple[PreTrainedModel, TransformersModel]) -> None:
    theirs, ours = pair
    runner = runner_over(ours)
    first, second = sequence_of(tokens_of(90), [3, 1, 4, 15, 9, 2]), sequence_of(tokens_of(50), [6, 5, 35, 8])
    execute(runner, StepPlan((chunk(first, 33), chunk(second, 49))))
    first.num_computed_tokens = 33
    second.num_computed_tokens = 49
    computed = logits(runner, StepPlan((chunk(second, 1), chunk(first, 57))))
    expected = torch.stack([logits_of(theirs, tokens_of(50))[-1], logits_of(theirs, tokens_of(90))[-1]])
    torch.testing.assert_close(computed, expected, atol=2e-4, rtol=1e-4)


def test_a_swapped_sequence_continues_in_other_blocks(pair: tuple[PreTrainedModel, TransformersModel]) -> None:
    theirs, ours = pair
    runner = runner_over(ours)
    subject, other = sequence_of(tokens_of(61), [7, 11, 13, 0], prompt_logprobs=0), sequence_of(tokens_of(64), [])
    execute(runner, StepPlan((chunk(subject, 60),)))
    subject.num_computed_tokens = 60
    out = tuple(zip(subject.block_table, (19, 2, 5, 11), strict=True))
    other.block_table = [7, 11, 13, 0]  # overwritten in the step that swaps
    execute(runner, StepPlan((chunk(other, 64),), swap_out=out))
    subject.block_table = [21, 22, 23, 24]
    back = tuple(zip(subject.block_table, (19, 2, 5, 11), strict=True))
    result = execute(runner, StepPlan((chunk(subject, 1),), swap_in=back))
    assert result.token_ids[0] == int(logits_of(theirs, tokens_of(61))[-1].argmax())


def test_sampling_and_prompt_logprobs_are_computed_on_the_device(
    pair: tuple[PreTrainedModel, TransformersModel],
) -> None:
    theirs, ours = pair
    runner, tokens = runner_over(ours), tokens_of(70)
    settings: list[dict[str, Any]] = [
        {"prompt_logprobs": 2, "logprobs": 3},
        {"logit_bias": ((7, 100.0),)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ]
    subjects = [sequence_of(tokens, list(range(5 * n, 5 * n + 5)), **more) for n, more in enumerate(settings)]
    result = execute(runner, StepPlan(tuple(chunk(subject, 70) for subject in subjects)))
    expected = logits_of(theirs, tokens).log_softmax(-1)
    assert result.token_ids[0] == int(expected[-1].argmax())
    assert result.token_ids[1] == 7
    assert list(result.prompt_logprobs) == [0]
    found = torch.tensor([entry.logprob for entry in result.prompt_logprobs[0]], device=expected.device)
    own = expected[:-1].gather(-1, torch.tensor(tokens[1:], device=expected.device)[:, None]).squeeze(-1)
    torch.testing.assert_close(found, own, atol=5e-4, rtol=1e-4)


def test_dtype_auto_follows_the_device_and_half_precision_passes_the_self_check(
    device: torch.device, tmp_path: Path
) -> None:
    auto = choose_dtype(EngineConfig(model="", device=device.type))
    possible = {"cpu": {torch.float32, torch.bfloat16}, "cuda": {torch.bfloat16}}  # on a CPU by its instructions
    assert auto in possible[device.type]
    folder = save("llama", tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        model = load_transformers_model(folder, device=device, dtype=dtype, progress=lambda _fraction: None)
        computed = logits(runner_over(model), StepPlan((chunk(sequence_of(tokens_of(90), list(range(6))), 90),)))
        assert (computed.dtype, bool(computed.isfinite().all())) == (torch.float32, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_read_in_threads_are_those_of_the_file(
    device: torch.device, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1 << 10)  # several for each matrix
    source = ModelSource.open(str(save("llama", tmp_path)))

    def load(on: torch.device) -> list[torch.Tensor]:
        model: Any = load_on_gpu(source, on, dtype, max_model_length=64, progress=lambda _fraction: None)
        layers = [(each.qkv, each.attention_output, each.mlp.gate_up, each.mlp.down) for each in model._weights.layers]
        products = [product for layer in layers for product in layer] + [model._weights.head]
        return [product.weight.cpu() for product in products]

    for one, other in zip(load(device), load(torch.device("cpu")), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", [ON_GPU], indirect=True)
def test_the_cache_on_a_gpu_leaves_memory_for_the_peak_step(device: torch.device, tmp_path: Path) -> None:
    model = load_transformers_model(
        save("llama", tmp_path), device=device, dtype=torch.bfloat16, progress=lambda _fraction: None
    )
    config = EngineConfig(model="", device="cuda", memory_percent=50)
    free, total = torch.cuda.mem_get_info(device)
    memory = measure_gpu_cache_memory(model, config, host_runner)
    assert 0 < memory.default < memory.limit < free
    assert memory.default <= total // 2
    assert (
        measure_gpu_cache_memory(model, EngineConfig(model="", device="cuda", token_budget=16384), host_runner).limit
        < memory.limit
    )


@pytest.mark.parametrize("device", [ON_GPU], indirect=True)
def test_the_host_buffer_of_a_gpu_is_pinned(device: torch.device) -> None:
    cache = KVCache(KVShape(2, 2, 16, 16, 2), 8, 16, num_host_blocks=4, device=device, dtype=torch.bfloat16)
    assert cache.host_keys.is_pinned()
    cache.keys.normal_()
    kept = cache.keys[:, 3].clone()
    cache.swap([(3, 1)], [])
    cache.swap([], [(6, 1)])
    assert torch.equal(cache.keys[:, 6], kept)


@pytest.mark.parametrize("device", [ON_GPU], indirect=True)
def test_a_native_model_on_a_gpu_equals_transformers(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="native models are loaded with the engine's own dependencies")
    from fastgen.model.native import load_on_torch
    from fastgen.model.source import ModelSource

    folder = save("llama", tmp_path)
    ours = load_on_torch(
        ModelSource.open(str(folder)), device, torch.float32, max_model_length=None, progress=lambda _fraction: None
    )
    cache = KVCache(ours.kv_shape, 10, BLOCK_SIZE, device=device)
    runner = ModelRunner(ours, cache, max_model_length=160)
    subject = sequence_of(tokens_of(90), [3, 1, 4, 0, 9, 2])
    execute(runner, StepPlan((chunk(subject, 41),)))
    subject.num_computed_tokens = 41
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    torch.testing.assert_close(
        logits(runner, StepPlan((chunk(subject, 49),))), logits_of(theirs, tokens_of(90))[-1:], atol=2e-4, rtol=1e-4
    )
