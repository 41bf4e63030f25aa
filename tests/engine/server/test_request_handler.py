"""One HTTP request's generations, with an engine that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.text.matching import END, byte_tokenizer
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_times import StepCoefficients
from fastgen.link.in_flight import InFlight, Receiver
from fastgen.link.messages import StepReport, TokenOutput
from fastgen.server.http.api_error import APIError
from fastgen.server.http.request_context import RequestContext
from fastgen.server.serving import request_handler
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.text.rendered_request import RenderedRequest

TOKENIZER = byte_tokenizer(None)


class PlayedEngine:
    """Keeps the receivers of started requests and records cancellations."""

    exit_message = "the engine process was killed"

    def __init__(self) -> None:
        self.in_flight = InFlight(4)
        self.cancelled: list[str] = []

    def start_request(self, request: Request, receiver: Receiver) -> None:
        self.in_flight.open(request.id, receiver)

    def cancel(self, request_id: str) -> None:
        if self.in_flight.close(request_id):
            self.cancelled.append(request_id)

    def generate(self, text: str, *, request_id: str = "0", end: FinishReason | None = None) -> None:
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        self.in_flight.deliver(TokenOutput(request_id, tokens + [END] * (end is FinishReason.STOP), end))


def handler_of(engine: PlayedEngine, metrics: Metrics | None = None, *, num: int = 1, stop: str = "") -> RequestHandler:
    requests = [
        Request(id=str(index), prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=99)) for index in range(num)
    ]
    rendered = RenderedRequest(requests=requests[:1], num_choices=num, num_candidates=num, stop=(stop,) if stop else ())
    model = cast(Any, SimpleNamespace(engine=engine, tokenizer=TOKENIZER, fingerprint="fastgen"))
    return RequestHandler("cmpl-1", model, metrics or Metrics("m"), rendered, requests, arrival=0.0)


def sample(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(f"fastgen_{name}", {"model_name": "m"})
    assert value is not None
    return value


async def started(handler: RequestHandler, on_change: Callable[[], object] | None = None) -> asyncio.Task[None]:
    """Return the running stream of a request. Nothing is taken from it."""
    running = asyncio.create_task(handler.run(on_change or (lambda: None)))
    await asyncio.sleep(0)
    return running


async def test_a_stop_string_ends_the_generation_while_the_client_does_not_read() -> None:
    engine = PlayedEngine()
    await started(handler := handler_of(engine, stop="END"))
    engine.generate("one")
    engine.generate("two E")
    assert engine.cancelled == []
    engine.generate("ND three")
    assert engine.cancelled == ["0"]
    assert (handler.outputs[0].text, handler.outputs[0].finish_reason) == ("onetwo ", FinishReason.STOP)


async def test_what_has_not_been_taken_is_merged_into_one_delta() -> None:
    engine, changes = PlayedEngine(), list[None]()
    running = await started(handler := handler_of(engine), lambda: changes.append(None))
    engine.generate("a")
    assert [(index, delta.text) for index, delta in handler.take()] == [(0, "a")]
    for letter in "bcd":
        engine.generate(letter)
    assert len(changes) == 2, "told once until it is taken"
    engine.generate("e", end=FinishReason.LENGTH)
    ((_, rest),) = handler.take()
    assert (rest.text, rest.finish_reason) == ("bcde", FinishReason.LENGTH)
    await running
    assert handler.take() == []


async def test_a_response_that_is_not_streamed_is_woken_only_at_its_end() -> None:
    engine = PlayedEngine()
    handler = handler_of(engine, num=2)
    finishing = asyncio.ensure_future(handler.finish())
    await asyncio.sleep(0)
    for _ in range(5):
        engine.generate("a")
        assert not handler._ended.is_set()
    engine.generate("b", end=FinishReason.STOP)
    assert not handler._ended.is_set(), "the other generation has not ended"
    engine.generate("c", request_id="1", end=FinishReason.LENGTH)
    assert handler._ended.is_set()
    assert handler.take() == []
    assert [output.text for output in await finishing] == ["aaaaab", "c"]


@pytest.mark.parametrize(("num_tokens", "is_large"), [(5000, True), (50, False)])
async def test_a_long_output_is_parsed_and_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_large: bool
) -> None:
    context = RequestContext("a")
    monkeypatch.setattr(request_handler, "current", lambda: context)
    engine = PlayedEngine()
    with handler_of(engine) as handler:
        finishing = asyncio.ensure_future(handler.finish())
        await asyncio.sleep(0)
        engine.generate("a" * num_tokens, end=FinishReason.LENGTH)
        await finishing
    assert context.is_large == is_large


async def test_inter_token_latency_is_measured_when_tokens_arrive_not_when_they_are_read() -> None:
    engine, metrics = PlayedEngine(), Metrics("m")
    await started(handler_of(engine, metrics))
    for _ in range(4):
        engine.generate("a")
    assert sample(metrics, "inter_token_latency_seconds_count") == 3
    assert sample(metrics, "generation_tokens_total") == 4


async def test_the_time_to_the_first_token_counts_from_the_arrival_of_the_http_request() -> None:
    engine, metrics = PlayedEngine(), Metrics("m")
    await started(handler_of(engine, metrics))  # it arrived at 0 on the monotonic clock
    engine.generate("a")
    loop_time = asyncio.get_running_loop().time()  # the monotonic clock, too
    assert sample(metrics, "time_to_first_token_seconds_sum") == pytest.approx(loop_time, abs=5)


async def test_the_queue_time_counts_from_the_arrival_of_the_http_request(monkeypatch: pytest.MonkeyPatch) -> None:
    context = RequestContext("a")
    monkeypatch.setattr(request_handler, "current", lambda: context)
    engine = PlayedEngine()
    with handler_of(engine) as handler:
        finishing = asyncio.ensure_future(handler.finish())
        await asyncio.sleep(0)
        engine.in_flight.deliver(TokenOutput("0", [5], FinishReason.LENGTH, queue_seconds=1.0))
        await finishing
    assert context.outcome is not None
    loop_time = asyncio.get_running_loop().time()
    assert context.outcome.queue_seconds == pytest.approx(loop_time + 1, abs=5), "it arrived at 0"


async def test_cancelling_a_stream_cancels_its_generations_once() -> None:
    engine, metrics = PlayedEngine(), Metrics("m")
    running = await started(handler_of(engine, metrics, num=2))
    engine.generate("a", end=FinishReason.STOP)
    running.cancel()
    await asyncio.wait((running,))
    assert engine.cancelled == ["1"]
    assert sample(metrics, "e2e_request_latency_seconds_count") == 2


async def test_text_that_arrived_before_the_engine_died_can_be_taken() -> None:
    engine = PlayedEngine()
    running = await started(handler := handler_of(engine))
    engine.generate("a")
    engine.in_flight.end_all()
    with pytest.raises(APIError, match="killed"):
        await running
    assert [delta.text for _, delta in handler.take()] == ["a"]


async def test_a_request_that_the_engine_rejects_fails_with_an_error() -> None:
    engine, metrics = PlayedEngine(), Metrics("m")
    running = await started(handler_of(engine, metrics))
    engine.in_flight.deliver(TokenOutput("0", [], FinishReason.REJECTED))
    with pytest.raises(APIError, match="the engine rejected this request") as caught:
        await running
    assert (caught.value.status, caught.value.code) == (500, "internal_error")
    labels = {"model_name": "m", "finish_reason": "rejected"}
    assert metrics.registry.get_sample_value("fastgen_request_success_total", labels) == 1


async def test_an_output_that_cannot_be_handled_fails_its_own_request_only() -> None:
    engine = PlayedEngine()
    broken, other = handler_of(engine), PlayedReceiver()
    engine.in_flight.open("other", other)
    finishing = asyncio.ensure_future(broken.finish())
    await asyncio.sleep(0)
    broken.outputs[0]._output._detokenizer = cast(Any, None)
    state = StepReport(
        [TokenOutput("0", [5]), TokenOutput("other", [6])], StepStats(), SchedulerStats(), StepCoefficients()
    )
    engine.in_flight.record(state)
    assert other.tokens == [6]
    with pytest.raises(APIError, match="the server's log has the details") as failed:
        await finishing
    assert (failed.value.status, failed.value.code) == (500, "internal_error")
    assert engine.cancelled == ["0"]


class PlayedReceiver:
    """Records the tokens of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def push(self, output: TokenOutput) -> None:
        self.tokens += output.token_ids

    def fail(self, error: Exception | None = None) -> None:
        raise AssertionError(error)
