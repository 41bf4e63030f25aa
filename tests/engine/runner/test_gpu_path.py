"""The code path of a GPU, with its operators' twins on the CPU: its tokens equal those of the CPU's own kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.engine.core import Engine
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers.head import TorchHead
from fastgen.model.layers.torch_backend import DeviceTable
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.runner.gpu_runner import GPURunner
from fastgen.runner.interface import Runner
from fastgen.runner.loader import has_gpu_operators, load_runner
from fastgen.settings import EngineConfig
from support.given_grammars import Given
from support.tiny_models import VOCABULARY, saved
from support.workloads import random_requests

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def gpu_runner(
    folder: Path, *, num_blocks: int = 64, max_sequences: int = 8, cache_dtype: torch.dtype | None = None
) -> GPURunner:
    model = load_on_gpu(
        ModelSource.open(str(folder)),
        CPU,
        torch.float32,
        cache_dtype=cache_dtype,
        max_model_length=160,
        progress=lambda _fraction: None,
    )
    cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, num_host_blocks=8, dtype=model.cache_dtype)
    return GPURunner(model, cache, max_model_length=160, max_sequences=max_sequences)


def test_models_beyond_the_limits_of_the_operators_run_on_torch_operations(tmp_path: Path) -> None:
    architecture = ModelSource.open(str(saved("qwen3-moe", tmp_path))).architecture
    assert has_gpu_operators(architecture)
    assert not has_gpu_operators(replace(architecture, head_dim=512))
    assert not has_gpu_operators(replace(architecture, hidden_size=16400))
    layer = architecture.layers[0]
    for count, top_k in ((1024, 4), (64, 17)):
        assert layer.experts is not None
        larger = replace(layer, experts=replace(layer.experts, count=count, top_k=top_k))
        assert not has_gpu_operators(replace(architecture, layers=(larger, *architecture.layers[1:])))


def cpu_runner(folder: Path) -> Runner:
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, max_model_length=160, kv_cache_memory=4 << 20
    )
    return load_runner(ModelSource.open(str(folder)), config, lambda _stage, _fraction: None)


def samplings(rng: random.Random, number: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 20), ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, logprobs=3),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, min_tokens=3),
        SamplingParams(temperature=1.2, top_k=5, seed=number, logit_bias=((7, 3.0),), max_tokens=10),
    ]


def requests(count: int, seed: int) -> list[Request]:
    return random_requests(count, seed, longest=90, vocabulary=VOCABULARY, samplings=samplings)


def generate(
    runner: Runner, asked: list[Request], *, token_budget: int = 32
) -> dict[str, tuple[list[int], list[float], list[float]]]:
    engine = Engine(runner, EngineConfig(model="", token_budget=token_budget, max_sequences=8))
    outcome: dict[str, tuple[list[int], list[float], list[float]]] = {r.id: ([], [], []) for r in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs, prompt_logprobs = outcome[output.request_id]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
            prompt_logprobs += [entry.logprob for entry in output.prompt_logprobs or ()]
    return outcome


FAMILIES = [
    "llama",
    "llama-biases",
    "mistral-window",
    "qwen2-windows",
    "qwen3",
    "phi3-partial",
    "gemma2",
    "gemma3",
    "smollm3",
    "olmo3",
    "seed-oss",
    "granite",
    "ernie4-5",
    "glm4",
    "ministral",
    "ministral3",
    "multimodal-gemma3",
    "multimodal-mistral3",
]
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss", "gpt-oss-beyond"]


# Granite 4: a shared expert without a gate beside experts weighted by softmax, and no positions.
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, "granitemoehybrid-experts"])
def test_tokens_and_logprobs_equal_those_of_the_cpu_kernels(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    asked = requests(12, seed=len(family))
    ours, theirs = generate(gpu_runner(folder), asked), generate(cpu_runner(folder), asked)
    for request in asked:
        got, expected = ours[request.id], theirs[request.id]
        assert got[0] == expected[0], f"request {request.id}: {request.sampling}"
        for values, wanted in zip(got[1:], expected[1:], strict=True):
            assert values == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_sequences_continue_with_the_same_tokens(preemption: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    asked = requests(12, seed=5)
    expected = generate(cpu_runner(folder), asked)
    runner = gpu_runner(folder, num_blocks=11)
    engine = Engine(
        runner,
        EngineConfig(model="", token_budget=32, max_sequences=8, preemption=preemption, swap_space=1),
    )
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    preempted = swapped = 0
    for request in asked:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        preempted, swapped = preempted + report.step.preemptions, swapped + report.step.swapped_out
        for output in report.outputs:
            tokens[output.request_id] += output.token_ids
    assert preempted > 0
    assert (swapped > 0) == (preemption == "swap")
    assert tokens == {request_id: of_request[0] for request_id, of_request in expected.items()}


def test_a_float8_cache_gives_nearly_the_same_scores_with_any_chunks(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    asked = [Request(id="a", prompt_token_ids=list(range(3, 93)), sampling=sampling)]
    exact = generate(gpu_runner(folder), asked)["a"][2]
    runner = gpu_runner(folder, cache_dtype=torch.float8_e4m3fn)
    scores = [generate(runner, asked, token_budget=budget)["a"][2] for budget in (16, 128)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    difference = (torch.tensor(scores[0]) - torch.tensor(exact)).abs().mean().item()
    assert 0.01 < difference < 0.1, "the cache rounds keys and values to 4 bits"
    shape = runner._model.kv_shape
    assert shape.block_bytes(BLOCK_SIZE) * 4 == gpu_runner(folder)._model.kv_shape.block_bytes(BLOCK_SIZE)


@dataclass
class InTurn:
    """A grammar that allows one token at a time."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    is_pending: bool = False

    def fill_mask(self, mask: memoryview) -> None:
        token = self.tokens[len(self.accepted)]
        mask[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_masks_of_grammars_apply_to_their_rows_alone(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    wanted = {"b": [70, 5, 150, 33], "d": [9, 8, 120, 64, 31, 95]}
    free = [("a", 3, 6), ("c", 40, 3), ("e", 5, 6)]

    def request(name: str, length: int, generate: int, grammar: Grammar | None = None) -> Request:
        prompt = [3 + (7 * length + place) % 90 for place in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=generate, ignore_eos=True, grammar=grammar)
        return Request(id=name, prompt_token_ids=prompt, sampling=sampling)

    expected = {
        name: tokens for name, (tokens, _, _) in generate(gpu_runner(folder), [request(*f) for f in free]).items()
    }
    engine = Engine(
        gpu_runner(folder),
        EngineConfig(model="", token_budget=32, max_sequences=8),
        grammars=Given(*(InTurn(tokens) for tokens in wanted.values())),
    )
    masked = [request(name, 20, len(tokens), Grammar(kind="json_object")) for name, tokens in wanted.items()]
    found: dict[str, list[int]] = {}
    for asked in sorted([*masked, *(request(*f) for f in free)], key=lambda asked: asked.id):
        engine.add(asked)
    while engine.has_work:
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == expected | wanted


def test_a_step_ahead_is_launched_before_the_results_of_the_last_are_read(tmp_path: Path) -> None:
    runner = gpu_runner(saved("llama", tmp_path))
    engine = Engine(runner, EngineConfig(model="", token_budget=32, max_sequences=8))
    engine.add(Request(id="a", prompt_token_ids=[5, 6, 7], sampling=SamplingParams(temperature=0, max_tokens=4)))
    engine.step()
    assert len(engine._in_flight) == 1
    (ahead,) = engine._in_flight
    assert ahead.step.token_ids.tolist() == [-1], "the next step takes the token from the device"
    while engine.has_work:
        engine.step()
    assert engine._scheduler.pool.num_free == runner.num_blocks


def test_a_tied_embedding_exists_once(tmp_path: Path) -> None:
    model = load_on_gpu(
        ModelSource.open(str(saved("qwen2", tmp_path))),
        CPU,
        torch.bfloat16,  # a second conversion of the float32 weights would be a second tensor
        max_model_length=None,
        progress=lambda _fraction: None,
    )
    assert isinstance(model._weights.embedding, DeviceTable)
    assert isinstance(model._weights.head, TorchHead)
    assert model._weights.head.weight.data_ptr() == model._weights.embedding.matrix.data_ptr()
