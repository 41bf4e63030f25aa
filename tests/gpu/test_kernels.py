"""Every operator of `fastgen.kernels.gpu` on a GPU against its twin on the CPU, and a whole model by both.

The first case of each table runs on CPUs too, where both sides are the twin: this proves the tests, not the kernels. On
a machine with a GPU and only torch, triton and pytest, in the repository's folder:
`PYTHONPATH=engine python -m pytest -c /dev/null --noconftest tests/gpu/test_kernels.py`.

Tolerances: float32 sums of another order; one rounding to the other side in bfloat16 and float16, and two where a
rounded value is processed further.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu import standins
from torch.utils._pytree import tree_leaves

standins.install()

from fastgen.core.constraint import Constraint  # noqa: E402
from fastgen.core.request import FinishReason, Pooling, Request  # noqa: E402
from fastgen.core.sampling_params import Grammar, SamplingParams  # noqa: E402
from fastgen.core.sequence import RowParameters, Sequence  # noqa: E402
from fastgen.core.step_output import TokenLogprobs  # noqa: E402
from fastgen.core.step_plan import Chunk, StepPlan  # noqa: E402
from fastgen.engine.core import Engine  # noqa: E402
from fastgen.kernels.gpu.attention import paged_attention  # noqa: E402
from fastgen.kernels.gpu.attention_tiles import workspace_elements  # noqa: E402
from fastgen.kernels.gpu.elementwise import ACTIVATIONS, add_rms_norm, gated_activation  # noqa: E402
from fastgen.kernels.gpu.embedding import embed  # noqa: E402
from fastgen.kernels.gpu.experts import experts, route_experts  # noqa: E402
from fastgen.kernels.gpu.rotary_cache import rotary_cache  # noqa: E402
from fastgen.kernels.gpu.sampling.logits import process_logits  # noqa: E402
from fastgen.kernels.gpu.sampling.logprobs import token_logprobs  # noqa: E402
from fastgen.kernels.gpu.sampling.tokens import commit_tokens, sample_tokens  # noqa: E402
from fastgen.kernels.gpu.transfers import upload  # noqa: E402
from fastgen.kernels.gpu.work_list import list_attention_work  # noqa: E402
from fastgen.kv_cache.sizing import KVShape  # noqa: E402
from fastgen.kv_cache.swap import CUDAStreams, Swapper  # noqa: E402
from fastgen.kv_cache.tensors import KVCache  # noqa: E402
from fastgen.model.checkpoint.checkpoint import Checkpoint  # noqa: E402
from fastgen.model.config.from_huggingface import architecture_from_huggingface  # noqa: E402
from fastgen.model.device_input import DeviceRows, InputLayout  # noqa: E402
from fastgen.model.layers.decoder import Decoder  # noqa: E402
from fastgen.model.layers.gpu_backend import GPUBackend, GPUFormat  # noqa: E402
from fastgen.model.layers.rope import Rope  # noqa: E402
from fastgen.model.layers.weights import DecoderWeights  # noqa: E402
from fastgen.model.step_input import StepInput, StepInputBuilder  # noqa: E402
from fastgen.runner.gpu_runner import GPURunner  # noqa: E402
from fastgen.runner.graphs import CUDAGraphCapture, Graph, GraphCapture, StepGraphs, token_counts  # noqa: E402
from fastgen.runner.loader import gpu_runner, with_cache  # noqa: E402
from fastgen.sampling.device_sampler import DeviceSampler  # noqa: E402
from fastgen.sampling.slots import SamplingSlots  # noqa: E402
from fastgen.settings import EngineConfig  # noqa: E402  (with stand-ins for packages that are not installed)

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch that is built for it"),
]
CPU = torch.device("cpu")
EXACT = {"atol": 0.0, "rtol": 0.0}
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2**-6},
}
DTYPES = [*TOLERANCES]


def table(**columns: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test on a GPU with every combination of the columns' values, and on the CPU with the first."""
    cases = list(product(*columns.values()))
    on_gpu = [pytest.param("cuda", *case, marks=NEEDS_GPU) for case in cases]
    return pytest.mark.parametrize(("device", *columns), [("cpu", *cases[0]), *on_gpu], indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    torch.manual_seed(0)
    return torch.device(request.param)


def compare(
    device: torch.device, function: Callable[..., Any], *arguments: Any, close: Any = EXACT, **more: Any
) -> Any:
    """Call `function` on the CPU and on the device; compare its results and its arguments after the call."""

    def on(place: torch.device) -> tuple[list[Any], dict[str, Any]]:
        def copy(value: Any) -> Any:
            return value.clone().to(place) if isinstance(value, torch.Tensor) else value

        return [copy(value) for value in arguments], {name: copy(value) for name, value in more.items()}

    (expected_arguments, expected_more), (found_arguments, found_more) = on(CPU), on(device)
    expected = function(*expected_arguments, **expected_more)
    found = function(*found_arguments, **found_more)
    pairs = zip(
        tree_leaves((expected, expected_arguments, expected_more)),
        tree_leaves((found, found_arguments, found_more)),
        strict=True,
    )
    for wanted, got in pairs:
        if isinstance(wanted, torch.Tensor):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            torch.testing.assert_close(got.cpu().float(), wanted.float(), equal_nan=True, **close)


@table()
def test_comparing_finds_a_wrong_result(device: torch.device) -> None:
    calls = iter([1.0, 1.5])
    with pytest.raises(AssertionError, match="not equal"):
        compare(device, lambda x: x * next(calls), torch.ones(3))
    calls = iter([1.0, 1.5])
    with pytest.raises(AssertionError, match="not equal"):
        compare(device, lambda x: x.mul_(next(calls)).sum() * 0, torch.ones(3))


@table(shape=[(5, 7), (1, 4096), (300, 1024), (0, 64)], dtype=DTYPES)
def test_embed(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, hidden = shape
    matrix, ids = torch.randn(50, hidden).to(dtype), torch.randint(-1, 50, (rows,), dtype=torch.int32)
    sources = torch.randint(3, (rows,), dtype=torch.int32)
    for scale in (1.0, 53.07):
        compare(device, embed, matrix, ids, torch.tensor([9, 4, 7], dtype=torch.int32), sources, scale)


@table(
    shape=[(3, 7), (1, 4096), (300, 1024), (64, 8192), (0, 64)],
    dtype=DTYPES,
    operands=["normed update", "update", "none"],
)
def test_add_rms_norm(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, operands: str) -> None:
    stream, update = torch.randn(2, *shape).to(dtype)
    update_weight, weight = torch.rand(2, shape[1])
    others = {"none": (None, None), "update": (update, None), "normed update": (update, update_weight)}[operands]
    compare(device, add_rms_norm, stream, *others, weight, 1e-5, close=TOLERANCES[dtype])


@table(shape=[(5, 9), (1, 14336), (300, 3072), (0, 16)], dtype=DTYPES, activation=list(ACTIVATIONS))
def test_gated_activation(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, activation: str) -> None:
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    compare(device, gated_activation, gate_up, activation, close=TOLERANCES[dtype])


@table(
    shape=[(7, 9, 3, 64, 64), (1, 32, 8, 128, 128), (200, 16, 8, 128, 128), (5, 4, 4, 80, 32), (3, 8, 1, 256, 256)],
    is_normed=[True, False],
    dtype=DTYPES,
)
def test_rotary_cache(
    device: torch.device, shape: tuple[int, int, int, int, int], is_normed: bool, dtype: torch.dtype
) -> None:
    rows, heads, kv_heads, head_dim, rotated = shape
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    norms = torch.rand(2, head_dim).unbind() if is_normed else (None, None)
    angles = torch.rand(400, rotated // 2) * 6
    positions, slots = torch.randint(400, (rows,), dtype=torch.int32), torch.randperm(16 * 20)[:rows].int()
    if rows > 2:
        slots[-2:], positions[-2:] = -1, 0
    caches = torch.full((2, 20, kv_heads, 16, head_dim), 3.0).to(dtype).unbind()
    arguments = (qkv, *norms, angles.cos(), angles.sin(), positions, slots, *caches, heads, 1e-6)
    compare(device, rotary_cache, *arguments, close=TOLERANCES[dtype])


DECODES = ((1, 0), (1, 15), (1, 16), (1, 199), (1, 3000))  # rows and context of each sequence
CHUNKS = ((1, 90), (1, 0), (40, 0), (21, 70), (130, 31), (300, 500))
SKEWED = ((1, 20000), *((1, 500),) * 40, (5, 9000), (300, 12000), (8, 40), (3, 0))
SHAPES = [(9, 3, 64), (32, 8, 128), (16, 8, 128), (8, 1, 256), (14, 2, 64), (4, 4, 80)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 33},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "sinks and a window": {"sinks": True, "window": 33},
}


class Step:
    """Random rows over a cache whose unwritten slots, and blocks of no sequence, are NaN."""

    def __init__(
        self,
        sequences: tuple[tuple[int, int], ...],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        block_size: int = 64,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        heads, kv_heads, head_dim = shape
        lengths = [rows + context for rows, context in sequences]
        sizes = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(sizes)) + 1).split(sizes)  # block 0 is in no table
        caches = torch.randn(2, sum(sizes) + 1, kv_heads, block_size, head_dim)
        caches[:, 0] = torch.nan
        self.tables = torch.zeros(len(sizes) + 1, max(sizes) + 1, dtype=torch.int32)
        for sequence, (blocks, length) in enumerate(zip(order, lengths, strict=True)):
            self.tables[sequence, : len(blocks)] = blocks
            caches[:, blocks[-1], :, (length - 1) % block_size + 1 :] = torch.nan
        self.keys, self.values = caches.to(cache_dtype or dtype).unbind()
        self.starts = torch.tensor([0, *(rows for rows, _ in sequences), 0]).cumsum(0).int()  # and a padded sequence
        self.lengths = torch.tensor([*lengths, 0], dtype=torch.int32)
        self.query = torch.randn(int(self.starts[-1]) + 2, heads, head_dim).to(dtype)  # and two padded rows
        self.scale = head_dim**-0.5

    def compare(self, device: torch.device, close: Any, **options: Any) -> None:
        if options.pop("sinks", None):
            options["sinks"] = torch.linspace(-2, 3, self.query.shape[1])

        def run(*operands: torch.Tensor, **more: Any) -> torch.Tensor:
            query, keys, _, starts, lengths, _ = operands
            first, second = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
            _, kv_heads, _, head_dim = keys.shape
            workspace = torch.zeros(workspace_elements(kv_heads, head_dim, query.device), device=query.device)
            work = list_attention_work(query, keys, starts, lengths, more.get("window", 0))
            for out in (first, second):  # the workspace is as it was after a launch
                paged_attention(out, *operands, work, workspace, scale=self.scale, **more)
            torch.testing.assert_close(first, second, **EXACT)
            return first

        operands = self.query, self.keys, self.values, self.starts, self.lengths, self.tables
        compare(device, run, *operands, close=close, **options)


@table(sequences=[DECODES, CHUNKS, SKEWED], shape=SHAPES, dtype=DTYPES)
def test_paged_attention(
    device: torch.device, sequences: tuple[tuple[int, int], ...], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    Step(sequences, shape, dtype).compare(device, TOLERANCES[dtype])


@table(sequences=[CHUNKS, DECODES], block_size=[16, 128], options=OPTIONS)
def test_paged_attention_with_options(
    device: torch.device, sequences: tuple[tuple[int, int], ...], block_size: int, options: str
) -> None:
    step = Step(sequences, (8, 2, 64), torch.bfloat16, block_size)
    step.compare(device, TOLERANCES[torch.bfloat16], **OPTIONS[options])


@table(sequences=[CHUNKS, DECODES])
def test_paged_attention_over_a_float8_cache(device: torch.device, sequences: tuple[tuple[int, int], ...]) -> None:
    step = Step(sequences, (8, 2, 128), torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    step.compare(device, TOLERANCES[torch.bfloat16], key_scale=1.5, value_scale=0.25)


@table(shape=[(70, 60, 4), (1, 8, 2), (300, 128, 8), (2, 512, 16), (0, 8, 2)], dtype=DTYPES, normalised=[True, False])
def test_route_experts(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, normalised: bool) -> None:
    rows, count, top_k = shape
    logits = (torch.randn(rows, count) * 3).to(dtype)
    compare(device, route_experts, logits, top_k, normalised, close=TOLERANCES[dtype])


@table(
    shape=[(37, 5, 3, 80, 72), (1, 8, 2, 128, 96), (300, 16, 4, 256, 128), (700, 4, 1, 64, 64), (0, 4, 2, 64, 64)],
    dtype=DTYPES,
    biased=[False, True],
)
def test_experts(device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype, biased: bool) -> None:
    rows, count, top_k, hidden, width = shape
    x = torch.randn(rows, hidden)
    gate_up, down = torch.randn(count, 2 * width, hidden) / hidden**0.5, torch.randn(count, hidden, width) / width**0.5
    ids = torch.rand(rows, count).argsort(-1)[:, :top_k].int()
    operands = (x.to(dtype), gate_up.to(dtype), down.to(dtype), torch.rand(rows, top_k).to(dtype), ids)
    options = ("clamped_swiglu", torch.randn(count, 2 * width), torch.randn(count, hidden)) if biased else ("silu",)
    compare(device, experts, *operands, *options, close=TOLERANCES[dtype])


SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-k": SamplingParams(top_k=40, seed=2),
    "top-p": SamplingParams(top_p=0.9, seed=3),
    "many kept": SamplingParams(top_k=3000, top_p=0.99, seed=4),
    "min-p": SamplingParams(min_p=0.05, seed=5),
    "typical-p": SamplingParams(typical_p=0.7, seed=6),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, temperature=0.9, seed=7
    ),
    "bias and bans": SamplingParams(
        logit_bias=((5, 4.0), (90, -3.0)), bad_words=((7,), (11, 13)), min_tokens=9, temperature=0
    ),
}


@table(vocabulary=[131, 4097, 128256], dtype=DTYPES)
def test_the_sampler(device: torch.device, vocabulary: int, dtype: torch.dtype) -> None:
    count = len(SAMPLING) + 1  # and a padded row
    rows = SamplingSlots(vocabulary, count, CPU, {2})
    for slot, sampling in enumerate(SAMPLING.values()):
        rows.admit(RowParameters(slot, sampling, sampling.seed or 0, num_prompt_tokens=4, tokens=[3, 5, 7, 9, 11, 5]))
    rows.flush()
    slots = torch.tensor([*range(len(SAMPLING)), -1], dtype=torch.int32)
    positions = torch.full((count,), 6, dtype=torch.int32)
    logits = (torch.randn(count, vocabulary) * 3).to(dtype)
    masks = torch.randint(-(2**31), 2**31 - 1, (1, -(-vocabulary // 32)), dtype=torch.int32)
    mask_rows = torch.full((count,), -1, dtype=torch.int32)
    mask_rows[1] = 0
    state = rows.columns, rows.lists, rows.counts

    def process(logits: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
        scores, is_changed, *sums = (part[:-1] for part in process_logits(logits, *inputs))  # without the padded row
        return [scores[is_changed != 0], is_changed, *sums]

    inputs = (logits, slots, positions, *state, masks, mask_rows)
    compare(device, process, *inputs, close={"atol": 1e-5, "rtol": 1e-5})
    scores = [logits.float(), *process_logits(*inputs)]
    tokens = sample_tokens(*(part.clone() for part in scores), slots, positions, rows.columns)

    on_device = [part.clone().to(device) for part in scores]
    found = sample_tokens(*on_device, slots.to(device), positions.to(device), rows.columns.to(device)).cpu()
    # A token within rounding of a threshold, or of the number drawn, may be kept on one side only.
    assert (found != tokens).sum() <= 1, (found, tokens)
    assert found[0] == tokens[0]
    compare(device, commit_tokens, tokens, slots, positions, *state, rows.last_tokens)


@table(vocabulary=[3, 4097, 128256], dtype=DTYPES)
def test_token_logprobs(device: torch.device, vocabulary: int, dtype: torch.dtype) -> None:
    # Different logits: ties have no common order of sums.
    logits = torch.stack([torch.randperm(vocabulary) for _ in range(6)]).float().div(vocabulary).mul(9).to(dtype)
    rows, tokens = torch.tensor([4, 0, 5], dtype=torch.int32), torch.tensor([0, 2, 1], dtype=torch.int32)
    for num_top in (0, 5, 20):
        compare(device, token_logprobs, logits, rows, tokens, num_top, close={"atol": 1e-5, "rtol": 1e-5})


# --- A whole model ---

BLOCK_SIZE = 16
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 30.0,
        "final_logit_softcapping": 20.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    },
    "gpt_oss": {
        "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20,
    },
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


class Fixed:
    """A tensor of a checkpoint, the same for every device."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
        values = torch.randn(shape, generator=generator)
        self._values = values * 0.15 if len(shape) > 1 else values * 0.1 + 1
        self.shape = shape

    def values(self) -> torch.Tensor:
        return self._values

    def float32(self) -> torch.Tensor:
        return self._values


def runner_of(kind: str, device: torch.device, dtype: torch.dtype, num_blocks: int = 64) -> GPURunner:
    model = model_of(kind, device, dtype)
    cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, device=device, dtype=dtype)
    return GPURunner(model, cache, max_model_length=256, max_sequences=8)


def model_of(kind: str, device: torch.device, dtype: torch.dtype, longest: int = 256) -> Decoder[Any]:
    architecture = architecture_from_huggingface({"model_type": kind, **SIZES, **MODELS[kind]}, None)
    tensors = {name: Fixed(name, shape) for name, shape in architecture.tensor_shapes().items()}
    checkpoint = Checkpoint(lambda name: tensors[name], architecture.head)  # type: ignore[arg-type,return-value]
    weights = DecoderWeights.load(architecture, checkpoint, GPUFormat(device, dtype), lambda _fraction: None)
    ropes = tuple(Rope(rope, longest=longest) for rope in architecture.rope_configs)
    return Decoder(weights, GPUBackend(architecture, ropes, longest, device), device=device, dtype=dtype)


def sequences() -> list[Sequence]:
    made = []
    for number, length in enumerate((90, 50, 33)):
        tokens = random.Random(length).choices(range(3, 331), k=length)
        sampling = SamplingParams(temperature=0, prompt_logprobs=0, logprobs=0)
        sequence = Sequence(
            Request(id=str(number), prompt_token_ids=tokens, sampling=sampling), ordinal=number, arrival=0.0, seed=0
        )
        sequence.block_table = list(range(8 * number, 8 * number + 6))
        made.append(sequence)
    return made


STEPS = ((33, 49, 10), (30, 1, 20), (1, 0, 3), (26, 0, 0))  # tokens of each sequence, to their ends


def logprobs_of(runner: GPURunner) -> torch.Tensor:
    """Return the logprob of each token of the prompts, computed in chunks that are mixed with single tokens."""
    made, builder = sequences(), StepInputBuilder(BLOCK_SIZE)
    found: dict[str, list[TokenLogprobs]] = {sequence.id: [] for sequence in made}
    for sizes in STEPS:
        pairs = sorted(zip(made, sizes, strict=True), key=lambda pair: pair[1] > 1)
        chunks = [Chunk(sequence, sequence.num_computed_tokens, size) for sequence, size in pairs if size]
        ticket = runner.launch(builder.build(StepPlan(tuple(chunks))))
        ticket.sample([])
        for index, entries in ticket.result().prompt_logprobs.items():
            found[chunks[index].sequence.id] += entries
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
    assert [len(entries) for entries in found.values()] == [89, 49, 32]
    return torch.tensor([entry.logprob for entries in found.values() for entry in entries])


@table(kind=MODELS)
def test_a_model_in_float32_gives_the_cpus_logprobs(device: torch.device, kind: str) -> None:
    expected = logprobs_of(runner_of(kind, CPU, torch.float32))
    found = logprobs_of(runner_of(kind, device, torch.float32))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@table(kind=MODELS)
def test_a_model_in_bfloat16_is_as_near_to_float32_as_the_cpus(device: torch.device, kind: str) -> None:
    exact = logprobs_of(runner_of(kind, CPU, torch.float32))
    expected = (logprobs_of(runner_of(kind, CPU, torch.bfloat16)) - exact).abs().mean()
    found = (logprobs_of(runner_of(kind, device, torch.bfloat16)) - exact).abs().mean()
    assert found < 1.5 * expected


def requests() -> list[Request]:
    """Return requests of which every fourth repeats an earlier one: equal blocks are replaced in steps in flight."""
    made: list[Request] = []
    for number in range(12):
        if number % 4 == 3:
            made.append(replace(made[number - 3], id=str(number)))
            continue
        sampling = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12),
        ][number % 3]
        prompt = random.Random(number).choices(range(3, 331), k=1 + 7 * number % 90)
        made.append(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
    return made


@table(kind=MODELS, num_blocks=[64, 16])  # 16 are so few that sequences are preempted
def test_generations_on_a_gpu_equal_those_on_the_cpu(device: torch.device, kind: str, num_blocks: int) -> None:
    def generate(place: torch.device) -> dict[str, list[int]]:
        runner = runner_of(kind, place, torch.float32, num_blocks)
        engine = Engine(runner, EngineConfig(model="", token_budget=32, max_sequences=8))
        tokens: dict[str, list[int]] = {request.id: [] for request in requests()}
        for request in requests():
            engine.add(request)
        while engine.has_work:
            for output in engine.step().outputs:
                tokens[output.request_id] += output.token_ids
        return tokens

    assert generate(device) == generate(CPU)


class EvenTokens:
    """A grammar that allows even tokens, and the grammars of an engine that have only this one."""

    end: FinishReason | None = None
    is_pending = False

    def fill_mask(self, mask: memoryview) -> None:
        for word in range(len(mask)):
            mask[word] = 0x55555555

    def accept(self, token: int) -> None:
        assert token % 2 == 0

    def compile(self, _grammar: Grammar) -> Future[Callable[[], Constraint]]:
        compiled = Future[Callable[[], Constraint]]()
        compiled.set_result(EvenTokens)
        return compiled

    def prepare(self) -> None:
        """Do nothing: there are no tables."""

    def fill_masks(self, _constraints: Any, masks: memoryview) -> list[int]:
        self.fill_mask(masks)
        return []


def requests_of_all_kinds() -> list[Request]:
    """Return requests with grammars, logprobs and pooling; each is asked twice."""
    grammar = Grammar(kind="json_object")
    samplings = [
        SamplingParams(temperature=0, max_tokens=8, grammar=grammar),
        SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, grammar=grammar, logprobs=1),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=2),
    ]
    poolings = [Pooling(method="last"), Pooling(method="mean"), Pooling(method="logprobs", token_ids=(3, 7))]
    prompts = [random.Random(number).choices(range(3, 331), k=9 + 5 * number) for number in range(7)]
    generated = [{"prompt_token_ids": prompt, "sampling": how} for prompt, how in zip(prompts, samplings, strict=False)]
    pooled = [{"prompt_token_ids": prompt, "pooling": how} for prompt, how in zip(prompts[4:], poolings, strict=True)]
    return [Request(id=f"{number}-{copy}", **each) for number, each in enumerate(generated + pooled) for copy in "ab"]  # type: ignore[arg-type]


def results(runner: GPURunner) -> tuple[dict[str, list[int]], torch.Tensor, set[str | None]]:
    """Return the tokens, the numbers of logprobs and pooling, and the reasons of eager steps.

    A last request has logprobs of more prompt tokens than a graph has rows for.
    """
    config = EngineConfig(model="", token_budget=128, max_sequences=8, chunking="greedy")
    engine = Engine(runner, config, grammars=EvenTokens())
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    long = Request(id="long", prompt_token_ids=list(range(3, 93)), sampling=sampling)
    tokens: dict[str, list[int]] = {}
    numbers: dict[str, list[float]] = {}
    reasons: set[str | None] = set()
    for asked in (requests_of_all_kinds(), [long]):
        for request in asked:
            tokens[request.id], numbers[request.id] = [], []
            engine.add(request)
        while engine.has_work:
            report = engine.step()
            if report.step.prefill_tokens + report.step.decode_tokens:
                reasons.add(report.step.eager_reason)
            for output in report.outputs:
                tokens[output.request_id] += output.token_ids
                found = numbers[output.request_id]
                found += [entry.logprob for entry in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))]
                found += np.frombuffer(output.pooled or b"", np.float32).tolist()
    assert len(numbers["long"]) == 89
    return tokens, torch.tensor([number for found in numbers.values() for number in found]), reasons


def check_results(runner: GPURunner, kind: str) -> set[str | None]:
    """Compare all kinds of results with the CPU's; return the reasons of eager steps."""
    expected_tokens, expected_numbers, _ = results(runner_of(kind, CPU, torch.float32))
    tokens, numbers, reasons = results(runner)
    assert tokens == expected_tokens
    torch.testing.assert_close(numbers, expected_numbers, atol=2e-3, rtol=1e-3)
    return reasons


@table(kind=MODELS)
def test_grammars_logprobs_and_pooling_on_a_gpu_equal_those_on_the_cpu(device: torch.device, kind: str) -> None:
    runner = runner_of(kind, device, torch.float32)
    assert check_results(runner, kind) == {"off"}
    runner.capture_graphs((8, 32, 128), capture_on(device))
    assert check_results(runner, kind) == {None, "prompt_logprobs"}


@table(kind=MODELS)
def test_a_runner_of_the_loader_gives_the_cpus_results(device: torch.device, kind: str) -> None:
    config = EngineConfig(
        model="", device=device.type, token_budget=128, max_sequences=8, max_model_length=256, block_size=BLOCK_SIZE,
        kv_cache_memory=8 << 20, swap_space=4 << 20,
    )  # fmt: skip
    runner = with_cache(model_of(kind, device, torch.float32), config, gpu_runner)
    assert runner.num_host_blocks > 0
    assert (runner.graphs is not None) == (device.type == "cuda")
    check_results(runner, kind)


# --- Graphs, and copies beside the forward pass ---


def mixed_step(num_tokens: int, num_blocks: int, rng: random.Random) -> StepInput:
    """Return a step of decodes and chunks in up to 8 sequences, over random blocks."""
    sizes: list[int] = []
    while (left := num_tokens - sum(sizes)) > 0:
        sizes.append(left if len(sizes) == 7 else rng.choice((1, 1, rng.randint(1, left), left)))
    chunks, blocks = [], rng.sample(range(num_blocks), num_blocks)
    for number, size in enumerate(sorted(sizes, key=lambda size: size > 1)):
        length = rng.randint(size, size + 50)
        request = Request(id=str(number), prompt_token_ids=rng.choices(range(3, 331), k=length))
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.block_table = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        sequence.num_computed_tokens = length - size
        chunks.append(Chunk(sequence, length - size, size))
    return StepInputBuilder(BLOCK_SIZE).build(StepPlan(tuple(chunks)))


class Repeated:
    """Captures functions on any device: a replay calls them again."""

    def capture(self, run: Callable[[], None]) -> Graph:
        class Call:
            def replay(self) -> None:
                run()

        return Call()

    def used_bytes(self) -> int:
        return 0


def capture_on(device: torch.device) -> GraphCapture:
    return CUDAGraphCapture(device) if device.type == "cuda" else Repeated()


def check_replays(
    kind: str, device: torch.device, dtype: torch.dtype, counts: tuple[int, ...], random_steps: int
) -> None:
    """Compare each graph, and graphs for random steps, with eager forward passes.

    They equal those of the same padded input bit for bit, and nearly those of the input without padding.
    """
    longest, rng = counts[-1] + 64, random.Random(len(kind))
    num_blocks = -(-longest // BLOCK_SIZE) + 8 * 6
    model = model_of(kind, device, dtype, longest)
    cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, device=device, dtype=dtype)
    cache.keys.normal_()
    cache.values.normal_()
    rows = DeviceRows(8, -(-longest // BLOCK_SIZE), torch.zeros(8, dtype=torch.int32, device=device))
    layouts = [InputLayout.padded(count, 8, BLOCK_SIZE) for count in counts]
    hidden = torch.zeros(8, 128, dtype=dtype, device=device)
    sampler = DeviceSampler(331, 8, device, set())
    seeds = [SamplingParams(temperature=0.9 * (slot % 2), top_p=0.9, seed=slot) for slot in range(8)]
    for slot, sampling in enumerate(seeds):
        sampler.admit(RowParameters(slot, sampling, slot, num_prompt_tokens=1, tokens=[3]))
    sampler.flush()

    def sample(hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sampler.sample_without_lists(model.head(hidden), rows, positions)

    graphs = StepGraphs(layouts[-1], rows, lambda step: model.forward(step, cache), hidden, sample)
    graphs.capture(layouts, capture_on(device), lambda _fraction: None)
    for num_tokens in (*counts, *rng.choices(range(1, counts[-1] + 1), k=random_steps)):
        step = mixed_step(num_tokens, num_blocks, rng)
        num_sampled = len(step.sampled)
        assert graphs.eager_reason(step) is None
        replayed = graphs.replay(step)
        tokens = graphs.sampling.replay(num_sampled).clone()
        of_rows = replayed.sampled_rows.clone(), replayed.sampled_positions.clone()
        padded_rows = next(layout.num_logit_rows for layout in layouts if layout.num_logit_rows >= num_sampled)
        logits = model.head(replayed.hidden[:padded_rows])[:num_sampled].clone()
        found = replayed.hidden[:num_sampled].clone()
        assert torch.equal(tokens, sampler.sample(logits, *of_rows))
        layout = next(layout for layout in layouts if layout.num_tokens >= num_tokens)
        padded = rows.read(upload(rows.pack(step, layout), device), layout)
        torch.testing.assert_close(found, model.forward(padded, cache)[:num_sampled], atol=0, rtol=0)
        if dtype == torch.float32:  # products of other sizes add in another order
            exact = model.forward(rows.apply(step), cache)[:num_sampled]
            torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)


@table(dtype=[torch.float32, torch.bfloat16], kind=MODELS)
@torch.inference_mode()
def test_replayed_forward_passes_equal_eager_ones(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    budget, random_steps = (192, 30) if device.type == "cuda" else (12, 3)
    counts = token_counts(EngineConfig(model="", device="cuda", token_budget=budget))
    check_replays(kind, device, dtype, counts, random_steps)


@table(dtype=[torch.float32, torch.bfloat16], kind=MODELS)
@torch.inference_mode()
def test_the_largest_graphs_equal_eager_forward_passes(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """The default ladder has these counts among others, the last one is its largest."""
    counts = token_counts(EngineConfig(model="", device="cuda"))
    assert counts[-1] == 4096
    check_replays(kind, device, dtype, counts[-1:-17:-5][::-1] if device.type == "cuda" else (60, 70), 4)


@table(swaps=[True, False], num_blocks=[16, 64], kind=MODELS)
def test_generations_from_graphs_equal_those_of_eager_steps(
    device: torch.device, swaps: bool, num_blocks: int, kind: str
) -> None:
    settings: dict[str, Any] = {"preemption": "swap", "swap_space": 1} if swaps else {}

    def generate(counts: tuple[int, ...]) -> dict[str, list[int]]:
        model = model_of(kind, device, torch.float32)
        cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, num_host_blocks=32, device=device)
        runner = GPURunner(model, cache, max_model_length=256, max_sequences=8)
        if counts:
            runner.capture_graphs(counts, capture_on(device))
        engine = Engine(runner, EngineConfig(model="", token_budget=32, max_sequences=8, **settings))
        asked = requests() if device.type == "cuda" else requests()[:4]
        tokens: dict[str, list[int]] = {request.id: [] for request in asked}
        for request in asked:
            engine.add(request)
        while engine.has_work:
            report = engine.step()
            if report.step.prefill_tokens + report.step.decode_tokens:
                assert report.step.eager_reason == (None if counts else "off")
            for output in report.outputs:
                tokens[output.request_id] += output.token_ids
        return tokens

    assert generate((1, 2, 4, 8, 16, 32)) == generate(())


@table()
@torch.inference_mode()
def test_copies_beside_forward_passes_keep_every_block(device: torch.device) -> None:
    # On a GPU, use large blocks: copies then take long enough that a missing wait corrupts a block.
    layers = 16 if device.type == "cuda" else 1
    shape = KVShape(layers, num_kv_heads=8, key_dim=128, value_dim=128, element_bytes=2)
    cache = KVCache(shape, 32, 64, num_host_blocks=16, device=device, dtype=torch.bfloat16)
    swapper = Swapper(cache, CUDAStreams(device) if device.type == "cuda" else None)

    def forward(block: int, value: float) -> None:
        """Write a block as a forward pass does."""
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)
        cache.keys[:, block] = value
        cache.values[:, block] = -value

    def slots(*blocks: int) -> Any:
        return np.array([block * 64 for block in blocks], np.int32)

    for turn in range(3):
        for block in range(8):
            forward(block, 10 * turn + block)
        swapper.enqueue([(block, block) for block in range(8)], [], slots(8))
        forward(8, 1.0)
        swapper.enqueue([], [], slots(*range(8)))
        for block in range(8):
            forward(block, -1.0)
        swapper.enqueue([], [(16 + block, block) for block in range(8)], slots(9))
        found = cache.keys[:, 16:24].amax((0, 2, 3, 4)), cache.values[:, 16:24].amin((0, 2, 3, 4))
        assert [part.tolist() for part in found] == [
            [sign * (10.0 * turn + block) for block in range(8)] for sign in (1, -1)
        ]
        if device.type == "cuda":  # the host frees the blocks when it knows the copies to be done
            torch.cuda.synchronize()
