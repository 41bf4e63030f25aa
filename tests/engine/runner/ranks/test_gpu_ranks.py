"""A model on several ranks of the GPU's code path gives the results of one, eager and by simulated graphs.

The operators' twins compute on the CPU, and gloo stands in for NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.runner.test_gpu_path import BLOCK_SIZE, FAMILIES, MIXTURES, generate, gpu_runner, requests
from engine.runner.test_pooling import ANSWERS, LAST, MEAN, pooled, run
from fastgen.core.request import Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.engine.core import Engine
from fastgen.kernels.gpu.transfers import HostCopy
from fastgen.kv_cache.sizing import CacheMemory
from fastgen.link.messages import Failed
from fastgen.model.layers.rank_group import RankGroup
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.runner import device, graphs, loader
from fastgen.runner.failures import RankFailed
from fastgen.runner.gpu_runner import StepResults
from fastgen.runner.ranks.gpu_runners import FollowingGPURunner, RankedGPURunner
from fastgen.runner.ranks.ring import Ring, RingFiles
from fastgen.settings import EngineConfig
from support.given_grammars import Given
from support.ranks import ranked
from support.simulated_graphs import SimulatedCapture
from support.tiny_models import TINY, saved

pytestmark = pytest.mark.slow  # together over ten seconds

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "block_size": BLOCK_SIZE,
    "kv_cache_memory": 4 << 20,
    "swap_space": 4 << 20,
    "max_model_length": 160,
    "max_sequences": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Kinds of layers and heads; a mixture with and without shared experts; norms over all heads; biases; a tied head.
KINDS = ["llama", "qwen2", "gemma2", "olmo3", "qwen2-moe", "glm4-moe", "gpt-oss"]
# All whose operators run on GPUs.
ON_GPUS = [name for name in (*FAMILIES, *MIXTURES, "glm", "olmo2") if name in TINY and name != "gpt-oss-beyond"]
GRAPHS = "4,16,32"
# Of a request: tokens, their logprobs, and those of its prompt.
Results = tuple[list[int], list[float], list[float]]


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load for the operators' twins, and simulate graphs."""

    def load(source: ModelSource, config: EngineConfig, _progress: Any, group: RankGroup) -> Any:
        return load_on_gpu(
            source,
            torch.device("cpu"),
            torch.float32,
            max_model_length=config.max_model_length,
            progress=lambda _fraction: None,
            group=group,
        )

    monkeypatch.setattr(loader, "_load_on_gpu", load)
    monkeypatch.setattr(graphs, "CUDAGraphCapture", lambda _device: SimulatedCapture())
    # The graphs of all ranks, which are threads here, would set it in turn.
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize(
    ("family", "size", "cuda_graphs"),
    [
        *((family, 4, "off") for family in KINDS),
        ("llama", 2, "off"),
        ("llama", 4, GRAPHS),
    ],
)
def test_tokens_and_logprobs_equal_those_of_one_rank(family: str, size: int, cuda_graphs: str, tmp_path: Path) -> None:
    folder, asked = saved(family, tmp_path), requests(10, seed=len(family))
    expected = generate(gpu_runner(folder), asked)
    with ranked(folder, size, cuda_graphs=cuda_graphs, **SETTINGS) as (runner, followers):
        found = generate(runner, asked)
        replays = [replays_of(each) for each in (runner, *followers)]
    assert_equal(found, expected, asked)
    assert (sum(replays[0]) > 0) == (cuda_graphs != "off")
    assert all(each == replays[0] for each in replays), "a graph with collectives is launched by all ranks or none"


def assert_equal(found: dict[str, Results], expected: dict[str, Results], asked: list[Request]) -> None:
    """Assert that all requests have the same tokens and nearly the same logprobs."""
    for request in asked:
        assert found[request.id][0] == expected[request.id][0], f"request {request.sampling}"
        for values, wanted in zip(found[request.id][1:], expected[request.id][1:], strict=True):
            assert values == pytest.approx(wanted, abs=2e-3)


def replays_of(runner: Any) -> list[int]:
    if runner.graphs is None:
        return []
    return [graph.num_replays for graph in (*runner.graphs._graphs, *runner.graphs.sampling._graphs)]


@pytest.mark.parametrize(("family", "preemption"), [("llama", "recompute"), *((family, "swap") for family in ON_GPUS)])
def test_preempted_sequences_continue_with_the_same_tokens_in_graphs(
    family: str, preemption: str, tmp_path: Path
) -> None:
    folder, asked = saved(family, tmp_path), requests(9, seed=5)
    alone = gpu_runner(folder)
    expected = generate(alone, asked)
    memory = 11 * alone._model.kv_shape.block_bytes(BLOCK_SIZE)
    with ranked(folder, 2, cuda_graphs=GRAPHS, **{**SETTINGS, "kv_cache_memory": memory}) as (runner, followers):
        assert runner.num_blocks == 11
        found, counts = run_counted(runner, asked, preemption)
        replays = [replays_of(each) for each in (runner, *followers)]
    assert_equal(found, expected, asked)
    assert min(counts["preempted"], counts["cached"], sum(replays[0])) > 0
    assert (counts["swapped"] > 0) == (preemption == "swap")
    assert all(each == replays[0] for each in replays)


def run_counted(runner: Any, asked: list[Request], preemption: str) -> tuple[dict[str, Results], Counter[str]]:
    """Return the results of all requests, and the numbers of preemptions, swaps and cached tokens."""
    config = EngineConfig(model="", token_budget=32, max_sequences=8, preemption=preemption, swap_space=1)
    engine, counts = Engine(runner, config), Counter[str]()
    found: dict[str, Results] = {request.id: ([], [], []) for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        counts.update(preempted=report.step.preemptions, swapped=report.step.swapped_out)
        for output in report.outputs:
            tokens, logprobs, prompt_logprobs = found[output.request_id]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
            prompt_logprobs += [entry.logprob for entry in output.prompt_logprobs or ()]
            counts.update(cached=output.cached_tokens or 0)
    return found, counts


def test_masks_of_grammars_and_pooling_reach_rank_0_alone(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path)
    wanted = [70, 5, 150, 33]
    masked = replace(GREEDY, max_tokens=4, grammar=Grammar(kind="json_object"))
    asked = [Request(id="masked", prompt_token_ids=[5, 6, 7], sampling=masked)]
    asked.append(Request(id="free", prompt_token_ids=[9, 8], sampling=GREEDY))
    vectors = [pooled(number, 37, pooling) for number, pooling in enumerate((LAST, MEAN, ANSWERS))]
    alone = gpu_runner(folder)
    free, expected = generate(alone, asked[1:])["free"][0], run(alone, vectors)[0]
    with ranked(folder, 2, cuda_graphs=GRAPHS, **SETTINGS) as (runner, _):
        engine = Engine(
            runner,
            EngineConfig(model="", token_budget=32, max_sequences=8),
            grammars=Given(InTurn(wanted)),
        )
        for request in asked:
            engine.add(request)
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step().outputs:
                found.setdefault(output.request_id, []).extend(output.token_ids)
        assert found == {"masked": wanted, "free": free}
        ours = run(runner, vectors)[0]
    for request in vectors:
        values, theirs = ours[request.id][-1].pooled, expected[request.id][-1].pooled
        assert values is not None
        assert theirs is not None
        np.testing.assert_allclose(np.frombuffer(values, "<f4"), np.frombuffer(theirs, "<f4"), atol=1e-4)


def test_graphs_up_to_the_token_budget_that_calibration_finds_are_captured_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MOST_TOKENS", 24)
    folder = saved("llama", tmp_path)
    config = EngineConfig(model="", token_budget="auto", **SETTINGS)
    found = replace(config, token_budget=20)
    with ranked(folder, 2, token_budget="auto", **SETTINGS) as (runner, followers):
        runner.prepare_for(found, lambda _fraction: None)
        tokens = generate(runner, requests(4, seed=2), token_budget=20)
        ladders = [each.graphs.token_counts for each in (runner, *followers) if each.graphs is not None]
    assert ladders == [graphs.token_counts(found)] * 2
    alone = generate(gpu_runner(folder), requests(4, seed=2), token_budget=20)
    assert {name: each[0] for name, each in tokens.items()} == {name: each[0] for name, each in alone.items()}


def test_the_gpu_with_the_least_memory_sets_the_blocks_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured on each GPU; the blocks are those of all of them together."""
    per_rank = 1 << 18
    monkeypatch.setattr(device, "measure_gpu_cache_memory", lambda *_: CacheMemory(per_rank, per_rank))
    folder = saved("llama", tmp_path)
    source = ModelSource.open(str(folder))
    model = loader._load_on_gpu(source, EngineConfig(model=""), lambda *_: None, loader.ONE_RANK)
    model.device = torch.device("meta")
    config = EngineConfig(model="", device="cuda", block_size=BLOCK_SIZE, cuda_graphs="off")
    said: list[int] = []

    class Half:
        """Two ranks, of which the other has half of everything."""

        rank, size = 0, 2

        def agree(self, value: int) -> int:
            said.append(value)
            return value // 2

    def make(_model: Any, cache: Any, *_: Any) -> Any:
        return SimpleNamespace(num_blocks=cache.num_blocks, graphs=None)

    runner = loader.with_cache(model, config, make, group=Half())
    assert said[-1] == 2 * per_rank // model.kv_shape.of_ranks(2).block_bytes(BLOCK_SIZE)
    assert runner.num_blocks == said[-1] // 2


# --- Failures ---


class InTurn:
    """A grammar that allows one token at a time."""

    is_pending = False
    end = None

    def __init__(self, tokens: list[int]) -> None:
        self._left = list(tokens)

    def fill_mask(self, mask: memoryview) -> None:
        mask[self._left[0] // 32] = 1 << self._left[0] % 32

    def accept(self, token: int) -> None:
        assert token == self._left.pop(0)


class Event:
    """Stands in for an event of a GPU."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def query(self) -> bool:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the GPU, and nothing can interrupt it")


def results(*answers: Any) -> StepResults:
    copy = HostCopy(torch.zeros(1, dtype=torch.int32), Event(list(answers)))  # type: ignore[arg-type]
    return StepResults(None, copy, [], [], None)  # type: ignore[arg-type]


def test_rank_0_does_not_wait_for_a_gpu_whose_group_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a collective that never ends, or that was aborted and left nonsense."""
    with ranked(saved("llama", tmp_path), 2, cuda_graphs="off", **SETTINGS) as (runner, _):
        assert isinstance(runner, RankedGPURunner)
        for answers in ([False], [False, True]):
            checks = iter([None, RankFailed(Failed("rank 1: its process was killed", 1))])

            def check(checks: Iterator[Any] = checks) -> None:
                error = next(checks)
                if error is not None:
                    raise error

            with monkeypatch.context() as patched:
                patched.setattr(runner, "check", check)
                with pytest.raises(RankFailed, match="rank 1"):
                    runner.wait(results(*answers), None)


def test_a_rank_finds_an_error_of_its_gpu_while_no_step_comes() -> None:
    """Rank 0 sends none, because it waits for this rank's part of the last one."""
    follower = FollowingGPURunner.__new__(FollowingGPURunner)
    follower._ring = Ring(RingFiles.create(1))
    follower._group = SimpleNamespace(rank=1)  # type: ignore[assignment]
    follower._results = results(False, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        follower.follow()


def test_graphs_that_cannot_be_captured_on_one_rank_end_all(tmp_path: Path) -> None:
    class Failing(SimulatedCapture):
        def capture(self, _run: Callable[[], None]) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with ranked(saved("llama", tmp_path), 2, cuda_graphs="off", **SETTINGS) as (runner, _):
        assert isinstance(runner, RankedGPURunner)
        with pytest.raises(torch.OutOfMemoryError):
            runner.capture_graphs([4], Failing())
