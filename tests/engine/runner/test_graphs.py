"""Steps replayed from graphs give the tokens of steps launched one by one, on the code path of a GPU on the CPU."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from benchmarks.gpu.launches import Counting

from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.core.step_output import EagerReason
from fastgen.core.step_plan import StepPlan
from fastgen.engine.core import Engine
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.device_input import DeviceInput, DeviceRows, InputLayout
from fastgen.model.layers.decoder import Decoder
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner import graphs
from fastgen.runner.device import measure_gpu_cache_memory, run_first_steps
from fastgen.runner.gpu_runner import SPARE_ROWS, GPURunner, GPUTicket
from fastgen.runner.graphs import first_token_counts, row_counts, token_counts
from fastgen.runner.loader import gpu_runner, with_cache
from fastgen.settings import ConfigError, EngineConfig
from support.given_grammars import Given
from support.simulated_graphs import SimulatedCapture, SimulatedGraph
from support.tiny_models import VOCABULARY, saved
from support.workloads import random_requests

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK_SIZE = 16
BUDGET = 40
LADDER = (1, 2, 4, 8, 12, 16, 24, BUDGET)
CPU = torch.device("cpu")
Model = Decoder[DeviceInput]


def loaded(family: str, folder: Path) -> Model:
    source = ModelSource.open(str(saved(family, folder)))
    return load_on_gpu(source, CPU, torch.float32, max_model_length=160, progress=lambda _fraction: None)


class Poisoned(GPURunner):
    """A runner whose buffers hold nonsense before each step. What no step wrote of its cache is NaN."""

    def __init__(self, model: Model, *, num_blocks: int = 40, max_sequences: int = 8) -> None:
        cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, num_host_blocks=8)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        super().__init__(model, cache, max_model_length=160, max_sequences=max_sequences)
        self.executed: list[EagerReason | None] = []
        self.steps: list[StepInput] = []

    @torch.inference_mode()
    def launch(self, step: StepInput) -> GPUTicket:
        if self.graphs is not None:
            self.graphs._packed.fill_(2**30)
            self.graphs._hidden.fill_(torch.nan)
            self.graphs.sampling._tokens.fill_(2**30)
        ticket = super().launch(step)
        self.executed.append(ticket._eager_reason)
        self.steps.append(step)
        return ticket


def captured(model: Model, ladder: Sequence[int] = LADDER, **more: Any) -> Poisoned:
    runner = Poisoned(model, **more)
    runner.capture_graphs(ladder, SimulatedCapture())
    return runner


def samplings(rng: random.Random, number: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 12), ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=number, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=8, logprobs=3),
    ]


def requests(count: int, seed: int) -> list[Request]:
    return random_requests(count, seed, longest=70, vocabulary=VOCABULARY, samplings=samplings)


def generate(runner: GPURunner, asked: list[Request], **settings: Any) -> dict[str, list[int]]:
    engine = Engine(runner, EngineConfig(model="", token_budget=BUDGET, max_sequences=8, **settings))
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.mark.parametrize(
    "family", ["llama", "mistral-window", "gemma2", "qwen3-moe", "olmo3", "ministral3", "glm4-moe"]
)
def test_replayed_steps_give_the_tokens_of_eager_ones(family: str, tmp_path: Path) -> None:
    model, asked = loaded(family, tmp_path), requests(10, seed=len(family))
    runner = captured(model)
    assert generate(runner, asked) == generate(Poisoned(model), asked)
    assert set(runner.executed) == {None}
    assert runner.graphs is not None
    replays = [graph.num_replays for graph in runner.graphs._graphs]  # type: ignore[attr-defined]
    assert replays[-1] > 0, "no step was of the largest count"
    assert sum(count > 0 for count in replays) >= 3


def replays_of_sampling(runner: Poisoned) -> int:
    assert runner.graphs is not None
    return sum(graph.num_replays for graph in runner.graphs.sampling._graphs)  # type: ignore[attr-defined]


# What rows without lists may ask for.
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.02, "seed": 2},
    {"temperature": 0.7, "typical_p": 0.6, "seed": 3},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 1.1, "top_k": 300, "seed": 4},
]
# What needs lists of the step, of the slot, or counts.
WITH_LISTS: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": ((9, 3.0),)},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 1.0},
    {"temperature": 0, "bad_words": ((5,), (6, 7))},
    {"temperature": 0, "ignore_eos": False, "min_tokens": 3},
    {"temperature": 0, "logprobs": 2},
]


def asking(settings: Sequence[dict[str, Any]]) -> list[Request]:
    rng = random.Random(len(settings))
    return [
        Request(
            id=str(number),
            prompt_token_ids=rng.choices(range(3, VOCABULARY), k=rng.randint(1, 50)),
            sampling=SamplingParams(max_tokens=8, **{"ignore_eos": True, **setting}),
        )
        for number, setting in enumerate(settings)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_without_lists_are_sampled_by_graphs(family: str, tmp_path: Path) -> None:
    """The logits of Gemma 2 are capped in the graph."""
    model, asked = loaded(family, tmp_path), asking([setting for setting in PLAIN if "prompt_logprobs" not in setting])
    runner = captured(model)
    assert generate(runner, asked) == generate(Poisoned(model), asked)
    assert replays_of_sampling(runner) == sum(len(step.sampled) > 0 for step in runner.steps)


@pytest.mark.parametrize("setting", WITH_LISTS, ids=lambda setting: list(setting)[-1])
def test_rows_with_lists_are_sampled_outside_of_graphs(setting: dict[str, Any], tmp_path: Path) -> None:
    model, asked = loaded("llama", tmp_path), asking([setting])
    runner = captured(model)
    assert generate(runner, asked) == generate(Poisoned(model), asked)
    assert replays_of_sampling(runner) == 0


@dataclass
class Always:
    """A grammar that allows one token."""

    token: int
    end: FinishReason | None = None
    is_pending: bool = False

    def fill_mask(self, mask: memoryview) -> None:
        mask[self.token // 32] = 1 << self.token % 32

    def accept(self, token: int) -> None:
        """Nothing depends on the tokens."""


def test_rows_with_a_grammar_are_sampled_outside_of_graphs(tmp_path: Path) -> None:
    runner = captured(loaded("llama", tmp_path))
    engine = Engine(runner, EngineConfig(model="", token_budget=BUDGET, max_sequences=8), grammars=Given(Always(70)))
    (asked,) = asking([{"temperature": 0, "grammar": Grammar(kind="json_object")}])
    engine.add(asked)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert tokens == [70] * 8
    assert replays_of_sampling(runner) == 0


def test_graphs_sample_again_after_lists_and_counts_have_moved(tmp_path: Path) -> None:
    """There are counts at first for no row, and lists for 1,024 elements."""
    long = {"temperature": 0, "bad_words": tuple((9, token) for token in range(3, VOCABULARY))}
    model = loaded("llama", tmp_path)
    runner, eager = captured(model, max_sequences=12), Poisoned(model, max_sequences=12)
    before = runner._sampler.lists.data_ptr(), len(runner._sampler.counts)
    for settings in (PLAIN, [*WITH_LISTS, long, long], PLAIN):
        asked = asking(settings)
        assert generate(runner, asked) == generate(eager, asked)
    assert runner._sampler.lists.data_ptr() != before[0]
    assert len(runner._sampler.counts) > before[1]
    assert replays_of_sampling(runner) > 16, "of both plain batches"


def test_preempted_and_cached_sequences_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    shared = [7] * 64
    asked = [
        Request(id=r.id, prompt_token_ids=shared + r.prompt_token_ids, sampling=r.sampling) for r in requests(8, seed=3)
    ]
    for settings in ({"preemption": "swap", "swap_space": 1}, {"preemption": "recompute"}):
        runner = captured(model, num_blocks=12)
        assert generate(runner, asked, **settings) == generate(Poisoned(model), asked)
        assert set(runner.executed) == {None}


def test_steps_that_no_graph_can_run_are_launched_eagerly_and_reported(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def executed(runner: Poisoned, length: int, sampling: SamplingParams) -> list[EagerReason | None]:
        engine = Engine(runner, EngineConfig(model="", token_budget=100, max_sequences=2, prefix_caching=False))
        prompt = [3 + number for number in range(length)]
        engine.add(Request(id="a", prompt_token_ids=prompt, sampling=sampling))
        reasons = []
        while engine.has_work:
            step = engine.step().step
            reasons += [step.eager_reason] * (step.prefill_tokens + step.decode_tokens > 0)
        assert reasons == runner.executed[-len(reasons) :]
        return reasons

    runner = captured(model, (4, 24, 90), max_sequences=2)
    assert executed(runner, 91, plain) == ["tokens", None, None, None]
    assert executed(runner, 90, plain) == [None] * 4
    # There are logits for each token of a graph, but for no more than the 66 rows of the runner.
    assert executed(runner, 66, scored) == [None]
    assert executed(runner, 67, scored) == ["prompt_logprobs"]
    assert executed(Poisoned(model), 5, plain) == ["off"] * 4


def test_logprobs_of_prompts_are_those_of_eager_steps(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2)
    found = []
    for runner in (captured(model), Poisoned(model)):
        engine = Engine(runner, EngineConfig(model="", token_budget=BUDGET, max_sequences=8))
        for number in range(3):
            prompt = [4 + number * 7 + position for position in range(30)]
            engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
        entries = []
        while engine.has_work:
            for output in engine.step().outputs:
                entries += [(output.request_id, e.token_id, e.logprob) for e in output.prompt_logprobs or ()]
                entries += [(output.request_id, e.token_id, e.logprob) for e in output.logprobs or ()]
        found.append(sorted(entries))
        assert len(entries) == 3 * (29 + 2)
    assert [entry[:2] for entry in found[0]] == [entry[:2] for entry in found[1]]
    assert [entry[2] for entry in found[0]] == pytest.approx([entry[2] for entry in found[1]], abs=1e-4)


def test_more_new_blocks_than_a_graph_has_room_for_are_written_before_it(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path)
    prompt = [3 + number for number in range(100)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found, most = [], 0
    for runner in (captured(model), Poisoned(model)):
        engine, tokens = Engine(runner, EngineConfig(model="", token_budget=BUDGET, max_sequences=8)), []
        # The last takes six blocks from the prefix cache and computes four tokens, in a row that held other blocks.
        for name, tokens_of_prompt in (("a", prompt), ("b", prompt[::-1]), ("c", prompt)):
            engine.add(Request(id=name, prompt_token_ids=tokens_of_prompt, sampling=sampling))
            while engine.has_work:
                tokens += [token for output in engine.step().outputs for token in output.token_ids]
        found.append(tokens)
        most = max(step.table_updates.shape[1] for step in runner.steps if step.num_tokens == 4)
    assert most > InputLayout.padded(4, 72, BLOCK_SIZE).num_updates
    assert found[0] == found[1]
    assert found[0][:6] == found[0][12:]


def test_a_replayed_step_is_one_upload_and_one_graph_before_it_is_sampled(tmp_path: Path) -> None:
    model = loaded("qwen3-moe", tmp_path)
    runner = captured(model)
    generate(runner, requests(3, seed=1))

    class OneLaunch:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    step = runner.steps[-1]
    graph = OneLaunch()
    assert runner.graphs is not None
    runner.graphs._graphs = [graph] * len(LADDER)
    with Counting() as counting, torch.inference_mode():
        runner.graphs.replay(step)
    assert (counting.launches, counting.waits, graph.replays) == ({"copy_": 1}, {}, 1)


def test_a_step_sampled_after_the_next_was_launched_is_an_error(tmp_path: Path) -> None:
    runner = captured(loaded("llama", tmp_path))
    generate(runner, requests(2, seed=1))
    first, second = runner.steps[-2:]
    ticket = runner.launch(first)
    runner.launch(second)
    with pytest.raises(AssertionError, match="another step was launched"):
        ticket.sample([])


def test_graphs_are_captured_into_one_memory_pool_after_their_launches_were_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    @contextmanager
    def capturing(graph: Any, **how: Any) -> Iterator[None]:
        done.append((graph, how["pool"], how["capture_error_mode"]))
        yield

    stream = SimpleNamespace(wait_stream=lambda _other: None)
    stands_in = {
        "graph_pool_handle": lambda: "pool", "Stream": lambda _device: stream, "current_stream": lambda _device: stream,
        "stream": lambda _stream: nullcontext(), "CUDAGraph": lambda: f"graph {len(done)}", "graph": capturing,
    }  # fmt: skip
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture = graphs.CUDAGraphCapture(CPU)
    assert [capture.capture(lambda: done.append("run")) for _ in range(2)] == ["graph 1", "graph 4"]
    assert done == [
        *("run", ("graph 1", "pool", "thread_local"), "run"),
        *("run", ("graph 4", "pool", "thread_local"), "run"),
    ]


# --- Loading ---


def test_a_runner_that_only_measures_is_freed_without_a_collection(tmp_path: Path) -> None:
    """No garbage is collected while the engine starts: a cycle would keep the graphs' memory."""
    runner = captured(loaded("llama", tmp_path))
    generate(runner, requests(2, seed=1))
    alive, was_enabled = weakref.ref(runner), gc.isenabled()
    gc.disable()
    try:
        del runner
        assert alive() is None
    finally:
        if was_enabled:
            gc.enable()


def test_graphs_are_captured_up_to_the_token_budget_that_calibration_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calibration has those of the sizes that it measures. Then others are added, and larger ones dropped."""
    model, captures = loaded("llama", tmp_path), list[SimulatedCapture]()

    def new_capture(_device: torch.device) -> SimulatedCapture:
        captures.append(SimulatedCapture())
        return captures[-1]

    monkeypatch.setattr(graphs, "CUDAGraphCapture", new_capture)
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 64)
    auto = config(token_budget="auto", max_sequences=8, block_size=BLOCK_SIZE, kv_cache_memory=1 << 22)
    runner = with_cache(model, auto, gpu_runner)
    assert runner.graphs is not None
    assert runner.graphs.token_counts == first_token_counts(auto) == (16, 32, 48, 64)
    kept = dict(zip(runner.graphs.token_counts, runner.graphs._graphs, strict=True))
    progress, found = Mock(), replace(auto, token_budget=40)
    with caplog.at_level("INFO", "fastgen.model"):
        runner.prepare_for(found, progress)
    assert runner.graphs.token_counts == token_counts(found)
    assert runner.graphs.token_counts[-1] == 40
    now = dict(zip(runner.graphs.token_counts, runner.graphs._graphs, strict=True))
    assert all(now[count] is kept[count] for count in (16, 32))
    missing = [count for count in now if count not in kept]
    rows = [count for count in runner.graphs.sampling.counts if count not in (16, 32, 48, 64)]
    fractions = [each.args[0] for each in progress.mock_calls]
    assert fractions == [number / len(missing + rows) for number in range(len(missing + rows))]
    assert re.match(rf"captured {len(now)} CUDA graphs of 1 to 40 tokens", caplog.messages[-1])
    assert len(captures) == 1, "all graphs share a pool"
    progress.reset_mock()
    runner.prepare_for(found, progress)
    assert not progress.mock_calls
    engine = Engine(runner, found)
    for request in requests(6, seed=3):
        engine.add(request)
    while engine.has_work:
        assert engine.step().step.eager_reason is None


@pytest.mark.parametrize("settings", [{"token_budget": 100}, {"cuda_graphs": "4,16"}])
def test_calibration_is_not_awaited_where_it_decides_nothing(settings: dict[str, Any]) -> None:
    assert first_token_counts(config(**settings)) == token_counts(config(**settings))


def test_the_memory_of_the_largest_graphs_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that calibration does not need: their number is not known before."""
    monkeypatch.setattr(graphs, "CUDAGraphCapture", lambda _device: SimulatedCapture())
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 24)
    auto = config(token_budget="auto", max_sequences=8, max_model_length=160, block_size=BLOCK_SIZE)
    num_bytes = run_first_steps(loaded("llama", tmp_path), auto, gpu_runner)
    counts = token_counts(auto)
    assert num_bytes == len(counts) + len(row_counts(counts, 8 + SPARE_ROWS)) << 20


def test_the_loader_captures_the_ladder_and_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("llama", tmp_path)
    monkeypatch.setattr(graphs, "CUDAGraphCapture", lambda _device: SimulatedCapture())
    for chosen, lines in (("off", 0), ("4,16", 1)):
        caplog.clear()
        with caplog.at_level("INFO", "fastgen.model"):
            small = config(token_budget=16, block_size=16, kv_cache_memory=1 << 20, cuda_graphs=chosen)
            progress = Mock()
            runner = with_cache(model, small, partial(gpu_runner, progress=progress))
        assert (runner.graphs is not None) == bool(lines)
        assert progress.mock_calls == [call("capturing graphs", number / 4) for number in range(4 * lines)]
        said = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
        assert len(said) == lines
    expected = r"captured 2 CUDA graphs of 4 to 16 tokens and 2 of 4 to 16 sampled rows in \d+\.\d s: they take 4 MiB"
    assert re.fullmatch(expected, said[0])


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("operation not permitted when stream is capturing")],
)
def test_steps_are_launched_one_by_one_if_they_cannot_be_captured(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(SimulatedCapture):
        """Fails at the third graph."""

        def capture(self, run: Callable[[], None]) -> SimulatedGraph:
            if len(self.graphs) == 2:
                raise error
            return super().capture(run)

    model, asked = loaded("llama", tmp_path), requests(3, seed=1)
    runner = Poisoned(model)
    with caplog.at_level("WARNING", "fastgen.model"):
        runner.capture_graphs(LADDER, Failing())
    (said,) = caplog.messages
    assert said.startswith(f"no CUDA graphs of up to {BUDGET} tokens: {error}; steps run without graphs")
    assert generate(runner, asked) == generate(Poisoned(model), asked)
    assert set(runner.executed) == {"off"}


def test_other_errors_of_a_capture_end_the_engine(tmp_path: Path) -> None:
    class Broken(SimulatedCapture):
        def used_bytes(self) -> int:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Poisoned(loaded("llama", tmp_path)).capture_graphs(LADDER, Broken())


def test_the_memory_of_graphs_is_not_given_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama", tmp_path)
    constants = {"memory_allocated": 0, "max_memory_allocated": 5 << 20, "mem_get_info": (1 << 33, 1 << 34)}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", *constants):
        monkeypatch.setattr(torch.cuda, name, lambda *_args, name=name: constants.get(name))
    monkeypatch.setattr(graphs, "CUDAGraphCapture", lambda _device: SimulatedCapture())
    small = {"token_budget": 16, "block_size": 16, "max_model_length": 160}
    without, two = (
        measure_gpu_cache_memory(model, config(**small, cuda_graphs=chosen), gpu_runner) for chosen in ("off", "4,16")
    )
    assert without.limit - two.limit == 4 << 20, "two of forward passes and two of sampling"


# --- The ladder ---


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="", device="cuda", **settings)


def test_the_automatic_ladder_ends_with_the_token_budget_and_leaves_little_padding() -> None:
    for budget in (1, 7, 100, 1000, 2048, 4096):
        counts = token_counts(config(token_budget=budget))
        assert counts[-1] == budget
        assert all(now <= max(before + 1, before * 1.25) and now - before <= 128 for before, now in pairwise(counts))
    assert token_counts(config(token_budget=16)) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    assert (len(counts), token_counts(config(token_budget=65536)), token_counts(config())) == (60, counts, counts)


def test_a_ladder_can_be_given_or_switched_off() -> None:
    assert token_counts(config(cuda_graphs="8,2,2,512", token_budget=256)) == (2, 8, 256)
    assert token_counts(config(cuda_graphs="off")) == ()
    assert token_counts(EngineConfig(model="", device="cpu")) == ()


@pytest.mark.parametrize(
    ("device", "given", "said"),
    [
        ("cuda", "some", "--cuda-graphs some: must be auto or off or whole numbers with commas between them"),
        ("cuda", "8,", "--cuda-graphs 8,: must be auto or off or whole numbers with commas between them"),
        ("cuda", "0,8", "--cuda-graphs 0: must be at least 1"),
        ("cuda", "8,100000", "--cuda-graphs 100000: must be at most 65536"),
        ("cpu", "8", "--cuda-graphs 8: supported on --device cuda only: remove it"),
    ],
)
def test_a_bad_ladder_is_an_error_that_names_the_flag(device: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(model="", device=device, cuda_graphs=given)


# --- The simulated graph ---


def test_a_simulated_graph_finds_what_a_real_one_would_compute_wrongly() -> None:
    state = {"tensor": torch.zeros(4), "number": 1.0}

    def run() -> None:
        state["tensor"].add_(torch.ones(4) * state["number"])

    graph = SimulatedCapture().capture(run)
    graph.replay()
    state["number"] = 2.0
    with pytest.raises(AssertionError, match=r"was captured as .*mul"):
        graph.replay()
    state.update(tensor=torch.zeros(4), number=1.0)
    with pytest.raises(AssertionError, match=r"was captured as .*add_"):
        graph.replay()
    with pytest.raises(AssertionError, match="waits for the device"):
        SimulatedCapture().capture(lambda: print(state["tensor"].sum().item()))
    unwritten: list[torch.Tensor] = []
    SimulatedCapture().capture(lambda: unwritten.append(torch.empty(3)))
    assert unwritten[-1].isnan().all()


def test_padded_updates_of_block_tables_change_no_row() -> None:
    rows = DeviceRows(4, 3, torch.zeros(4, dtype=torch.int32))
    rows._tables.fill_(7)
    layout = InputLayout.padded(5, 4, BLOCK_SIZE)
    empty = rows.pack(StepInputBuilder(BLOCK_SIZE).build(StepPlan(())), layout)
    assert rows.read(torch.from_numpy(empty), layout).block_tables.tolist() == [[7] * 3] * 4
    assert (rows._tables[:4] == 7).all()


def test_the_arrays_of_an_input_are_aligned_and_padded() -> None:
    layout = InputLayout.padded(5, 3, BLOCK_SIZE)
    assert (layout.num_sequences, layout.num_logit_rows, layout.num_updates) == (3, 3, 3)
    packed = layout.pack(StepInputBuilder(BLOCK_SIZE).build(StepPlan(())), 10, unused_place=30)
    everything = torch.from_numpy(packed)
    padding = {"slot_mapping": -1, "sampled_rows": -1, "update_places": 30}
    for name in ("token_ids", "positions", "query_starts", "seq_lens", "rows", "logit_rows", *padding):
        part = layout.part(everything, name)
        assert part.storage_offset() % 4 == 0
        assert part.tolist() == [padding.get(name, 0)] * len(part)
