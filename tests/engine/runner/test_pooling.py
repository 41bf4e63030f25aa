"""Pooled hidden states equal transformers', on the CPU's kernels and on the code path of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.runner.test_gpu_path import BLOCK_SIZE, cpu_runner, gpu_runner
from fastgen.core.request import FinishReason, Pooling, Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine
from fastgen.link.messages import TokenOutput
from fastgen.runner.interface import Runner
from fastgen.settings import EngineConfig
from support.simulated_graphs import SimulatedCapture
from support.tiny_models import TINY, VOCABULARY, saved

# Largest difference of a normalised vector's element. Both compute in float32, in another order.
BOUND = 2e-5
LAST, MEAN = Pooling(method="last"), Pooling(method="mean")
ANSWERS = Pooling(method="logprobs", token_ids=(11, 42))

Vector = npt.NDArray[np.float32]
PATHS = pytest.mark.parametrize("make", [cpu_runner, gpu_runner], ids=["cpu", "gpu"])


def pooled(number: int, length: int, pooling: Pooling, *, prefix: tuple[int, ...] = ()) -> Request:
    rng = random.Random(number)
    tokens = [*prefix, *(rng.randrange(3, VOCABULARY) for _ in range(length - len(prefix)))]
    return Request(id=f"{pooling.method}-{number}", prompt_token_ids=tokens, pooling=pooling)


def generated(number: int, length: int) -> Request:
    rng = random.Random(100 + number)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = [rng.randrange(3, VOCABULARY) for _ in range(length)]
    return Request(id=f"generate-{number}", prompt_token_ids=tokens, sampling=sampling)


def run(runner: Runner, asked: list[Request], **settings: Any) -> tuple[dict[str, list[TokenOutput]], int]:
    """Return the outputs of each request, and the number of preemptions."""
    engine = Engine(runner, EngineConfig(model="", **{"token_budget": 32, "max_sequences": 8, **settings}))
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in asked}
    preemptions = 0
    for request in asked:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        engine.check_integrity()
        preemptions += report.step.preemptions
        for output in report.outputs:
            outputs[output.request_id].append(output)
    assert engine._scheduler.pool.num_free == runner.num_blocks
    return outputs, preemptions


def result(outputs: list[TokenOutput]) -> Vector:
    (output,) = outputs
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == []
    assert output.cached_tokens is not None
    assert output.pooled is not None
    return np.frombuffer(output.pooled, "<f4")


def normalised(values: Any) -> Vector:
    values = np.asarray(values, np.float64)
    return (values / np.linalg.norm(values)).astype(np.float32)


class Reference:
    """transformers' results."""

    def __init__(self, family: str) -> None:
        self._model = TINY[family].build()

    def of(self, request: Request) -> Vector:
        assert request.pooling is not None
        with torch.inference_mode():
            out = self._model(torch.tensor([request.prompt_token_ids]), output_hidden_states=True)  # type: ignore[operator]
        states = out.hidden_states[-1][0].double()
        match request.pooling.method:
            case "last":
                return normalised(states[-1].numpy())
            case "mean":
                return normalised(states.mean(0).numpy())
            case "logprobs":
                logprobs = torch.log_softmax(out.logits[0, -1].double(), 0)
                return logprobs[list(request.pooling.token_ids)].float().numpy()

    def check(self, request: Request, outputs: list[TokenOutput]) -> None:
        got, expected = result(outputs), self.of(request)
        if request.pooling is not None and request.pooling.method == "logprobs":
            assert got == pytest.approx(expected, abs=1e-4)
        else:
            assert np.abs(normalised(got) - expected).max() < BOUND, request.id


def mixture() -> list[Request]:
    """Return requests of all kinds, among them prompts of a token, of a block, of several steps, and equal ones."""
    lengths = [1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 90, 33]
    poolings = [pooled(i, n, kind) for i, n in enumerate(lengths) for kind in (LAST, MEAN, ANSWERS)]
    asked = [*poolings, *(generated(i, n) for i, n in enumerate([1, 20, 50]))]
    asked += [replace(request, id=f"{request.id}-again") for request in asked[::4]]
    random.Random(3).shuffle(asked)
    return asked


@PATHS
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window", "qwen3-moe"])
def test_pooled_requests_among_generations_equal_transformers(
    family: str, make: Callable[[Path], Runner], tmp_path: Path
) -> None:
    folder, asked, reference = saved(family, tmp_path), mixture(), Reference(family)
    outputs, _ = run(make(folder), asked)
    alone, _ = run(make(folder), [request for request in asked if request.pooling is None])
    for request in asked:
        if request.pooling is not None:
            reference.check(request, outputs[request.id])
        else:
            got, expected = ([token for output in of for token in output.token_ids] for of in
                             (outputs[request.id], alone[request.id]))  # fmt: skip
            assert got == expected, "pooling changes what others generate"


@PATHS
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_prompt_is_pooled_once(preemption: str, make: Callable[..., Runner], tmp_path: Path) -> None:
    # A generation that ranks first grows into the blocks of the prompts behind it.
    folder, reference = saved("llama", tmp_path), Reference("llama")
    first = Request(
        id="generate",
        prompt_token_ids=list(range(3, 33)),
        sampling=SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        priority=-1,
    )
    asked = [first, *(pooled(i, 90, kind) for i in range(3) for kind in (MEAN, LAST))]
    runner = make(folder)
    runner.num_blocks = 9  # type: ignore[misc]
    settings = {"preemption": preemption, "swap_space": 1, "chunking": "greedy", "token_budget": 9}
    outputs, preemptions = run(runner, asked, **settings)
    assert preemptions > 0
    for request in asked[1:]:
        reference.check(request, outputs[request.id])


@PATHS
def test_the_last_token_is_pooled_from_a_cached_prefix_and_the_mean_is_not(
    make: Callable[[Path], Runner], tmp_path: Path
) -> None:
    prefix = tuple(range(5, 5 + 3 * BLOCK_SIZE))
    asked = [pooled(i, 60 + i, kind, prefix=prefix) for i in range(2) for kind in (LAST, ANSWERS, MEAN)]
    reference = Reference("qwen3")
    outputs, _ = run(make(saved("qwen3", tmp_path)), asked, max_sequences=1)
    for request in asked:
        reference.check(request, outputs[request.id])
    cached = {request.id: outputs[request.id][0].cached_tokens for request in asked}
    assert cached == {
        "last-0": 0, "logprobs-0": 3 * BLOCK_SIZE, "mean-0": 0, "last-1": 48, "logprobs-1": 48, "mean-1": 0
    }  # fmt: skip


def test_steps_with_pooling_are_replayed_from_graphs_if_their_rows_fit(tmp_path: Path) -> None:
    runner, reference = gpu_runner(saved("llama", tmp_path)), Reference("llama")
    runner.capture_graphs((8, 16, 32, 96), SimulatedCapture())
    asked = [pooled(i, 20 + i, LAST) for i in range(6)] + [pooled(9, 90, MEAN), pooled(8, 25, ANSWERS)]
    engine = Engine(runner, EngineConfig(model="", token_budget=96, max_sequences=8, chunking="greedy"))
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in asked}
    reasons = set()
    for request in asked:
        engine.add(request)
        reasons.add((request.pooling is MEAN, _drained(engine, outputs)))
    assert reasons == {(False, None), (True, "pooling")}
    for request in asked:
        reference.check(request, outputs[request.id])


def _drained(engine: Engine, outputs: dict[str, list[TokenOutput]]) -> Any:
    reason = None
    while engine.has_work:
        report = engine.step()
        reason = report.step.eager_reason if report.outputs else reason
        for output in report.outputs:
            outputs[output.request_id].append(output)
    return reason


def test_cancelled_and_overdue_pooled_requests_free_their_blocks(tmp_path: Path) -> None:
    runner, now = cpu_runner(saved("llama", tmp_path)), [0.0]
    engine = Engine(runner, EngineConfig(model="", token_budget=16, max_sequences=8), clock=lambda: now[0])
    engine.add(pooled(1, 90, MEAN))
    engine.add(Request(id="late", prompt_token_ids=[5] * 90, pooling=LAST, deadline_seconds=5.0))
    engine.step()
    assert engine.cancel("mean-1")
    now[0] = 10.0
    ends = [output for _ in range(3) for output in engine.step().outputs]
    assert [(end.request_id, end.finish_reason, end.pooled) for end in ends] == [("late", FinishReason.DEADLINE, None)]
    engine.check_integrity()
    assert engine._scheduler.pool.num_free == runner.num_blocks


def test_a_prompt_as_long_as_the_model_can_be_pooled() -> None:
    request = Request(id="a", prompt_token_ids=[3] * 160, pooling=LAST)
    request.check(160, VOCABULARY)
    with pytest.raises(RequestError, match="prompt: 161 tokens; the limit is 160; shorten it"):
        Request(id="a", prompt_token_ids=[3] * 161, pooling=LAST).check(160, VOCABULARY)
    with pytest.raises(RequestError, match="prompt: 160 tokens; the limit is 160, generated tokens included"):
        Request(id="a", prompt_token_ids=[3] * 160).check(160, VOCABULARY)
