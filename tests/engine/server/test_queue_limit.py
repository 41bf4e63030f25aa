"""The bounded queue: requests beyond it are rejected before they reach the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine.server.serving import Serving, serving
from fastgen.core.request import FinishReason
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_times import StepCoefficients
from fastgen.link.in_flight import InFlight, Rate
from fastgen.link.messages import StepReport, TokenOutput
from fastgen.server.http.api_error import APIError
from fastgen.server.http.request_context import RequestContext
from fastgen.server.serving import queue_limit
from support.waiting import HANG_SECONDS, wait_until

PLACES, QUEUE = 2, 3
ENDLESS = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with two running places and a queue of three."""
    options = ("--max-sequences", str(PLACES), "--max-queued-requests", str(QUEUE))
    folder = tmp_path_factory.mktemp("small")
    with serving(folder, *options, environment={"SCRIPT_STEP_SECONDS": "0.02"}) as server:
        server.wait_status("/ready", 200)
        yield server


def send(server: Serving, body: dict[str, object]) -> socket.socket:
    content = json.dumps(body).encode()
    fields = f"Host: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(12).split()[1])


def running_and_waiting(server: Serving) -> tuple[float, float]:
    return server.metric("fastgen_num_requests_running"), server.metric("fastgen_num_requests_waiting")


def is_idle(server: Serving) -> bool:
    return running_and_waiting(server) == (0, 0)


def test_a_burst_fills_the_running_places_and_the_queue_exactly(small: Serving) -> None:
    rejected = small.metric("fastgen_request_rejected_total", default=0.0, reason="queue_full")
    with ExitStack() as connections:
        burst = [connections.enter_context(send(small, ENDLESS)) for _ in range(20)]
        statuses = [status_of(connection) for connection in burst]
        assert (statuses.count(200), statuses.count(429)) == (PLACES + QUEUE, 20 - PLACES - QUEUE)
        wait_until(lambda: small.metric("fastgen_num_requests_running") == PLACES, "the places to be taken")
        wait_until(lambda: small.metric("fastgen_num_requests_waiting") == QUEUE, "the queue to be full")
        assert small.metric("fastgen_request_rejected_total", reason="queue_full") == rejected + 15
    wait_until(lambda: is_idle(small), "the disconnected clients' sequences to be freed")
    assert small.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


PROMPT = [504] * 7


def test_waiting_requests_whose_clients_leave_are_arrived_and_cancelled_tokens(small: Serving) -> None:
    def counted() -> tuple[float, ...]:
        kinds = ("arrived", "rejected", "cancelled")
        return tuple(small.metric(f"fastgen_{kind}_prompt_tokens_total") for kind in kinds)

    wait_until(lambda: is_idle(small), "an idle server")
    before = counted()
    with ExitStack() as connections:
        burst = [connections.enter_context(send(small, {**ENDLESS, "prompt": PROMPT})) for _ in range(10)]
        statuses = [status_of(connection) for connection in burst]
        wait_until(lambda: small.metric("fastgen_num_requests_running") == PLACES, "the places to be taken")
    wait_until(lambda: is_idle(small), "the disconnected clients' sequences to be freed")
    assert statuses.count(429) == 10 - PLACES - QUEUE
    arrived, rejected, cancelled = (after - was for after, was in zip(counted(), before, strict=True))
    assert arrived - rejected == pytest.approx((PLACES + QUEUE) * len(PROMPT))
    assert rejected > 0  # by the mean length of the admitted prompts
    # Those that ran had received tokens, or at least been computed.
    assert QUEUE * len(PROMPT) <= cancelled <= (QUEUE + PLACES) * len(PROMPT)


def test_a_full_queue_sends_retry_after(small: Serving) -> None:
    with ExitStack() as connections:
        for _ in range(PLACES + QUEUE):
            assert status_of(connections.enter_context(send(small, ENDLESS))) == 200
        response = small.post("/v1/completions", ENDLESS)
        assert response.status_code == 429
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert response.json()["error"] == {
            "message": "the queue has no room for 1 more: 3 requests are waiting, and at most 3 may; try again later",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
    wait_until(lambda: is_idle(small), "the disconnected clients' sequences to be freed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [49152]}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "("}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": " "}], "continue_final_message": True}),
    ],
    ids=["unknown token", "invalid grammar", "long text", "template"],
)
def test_a_full_queue_rejects_a_request_before_any_work_is_done_for_it(
    small: Serving, path: str, body: dict[str, object]
) -> None:
    assert small.post(path, body).status_code == 400
    with ExitStack() as connections:
        for _ in range(PLACES + QUEUE):
            assert status_of(connections.enter_context(send(small, ENDLESS))) == 200
        assert small.post(path, body).status_code == 429
        # What is seen without a template, a tokenizer or a grammar is named even now: a retry would not help.
        invalid = small.post(path, body | {"temperature": -1})
        assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "temperature")
        assert small.post(path, body | {"truncation_side": "left"}).status_code == 400
    wait_until(lambda: is_idle(small), "the disconnected clients' sequences to be freed")


def test_all_prompts_of_a_request_are_admitted_or_none(small: Serving) -> None:
    body = {"max_tokens": 2, "prompt": ["a"] * (PLACES + QUEUE)}
    with send(small, ENDLESS) as one:
        assert status_of(one) == 200  # what runs may still be of the clients before
        assert small.post("/v1/completions", {**ENDLESS, **body, "max_tokens": 2000}).status_code == 429
        # A prompt that was admitted would go on as long.
        wait_until(lambda: running_and_waiting(small) == (1, 0), "only one to run")
    wait_until(lambda: is_idle(small), "the disconnected client's sequence to be freed")
    assert len(small.post("/v1/completions", body).json()["choices"]) == PLACES + QUEUE


def test_more_prompts_than_can_ever_be_admitted_are_rejected_without_retry(small: Serving) -> None:
    response = small.post("/v1/completions", {"max_tokens": 2, "prompt": ["a"] * (PLACES + QUEUE + 1)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert f"at most {PLACES + QUEUE}" in response.json()["error"]["message"]


def report(*outputs: TokenOutput, running: int, waiting: int) -> StepReport:
    scheduler = SchedulerStats(num_running=running, num_waiting=waiting)
    return StepReport(list(outputs), StepStats(), scheduler, StepCoefficients(), num_finished=len(outputs))


class Ignoring:
    """A receiver that ignores outputs."""

    def push(self, output: TokenOutput) -> None:
        """Do nothing."""

    def fail(self, error: Exception | None = None) -> None:
        """Do nothing."""


def test_requests_sent_since_the_last_report_take_its_free_places_first() -> None:
    in_flight = InFlight(max_sequences=4)
    for name in "abc":
        in_flight.open(name, Ignoring())
    assert in_flight.num_queued == 0
    in_flight.record(report(running=3, waiting=0))
    in_flight.reserve(["d", "e", "f"])
    assert in_flight.num_queued == 2
    in_flight.release(["f"])
    assert in_flight.num_queued == 1


@pytest.mark.parametrize(("running", "waiting"), [(7, 0), (8, 0), (9, 1)])
def test_a_rejected_request_does_not_count_as_waiting(
    running: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_limit, "current", lambda: RequestContext("a"))
    in_flight = InFlight(max_sequences=8)
    for number in range(running):
        in_flight.open(str(number), Ignoring())
    with pytest.raises(APIError, match=f"no room for 2 more: {waiting} requests are waiting, and at most 0 may"):
        queue_limit.admit(in_flight, ["a", "b"], max_queued_requests=0)
    assert in_flight.num_queued == waiting


def test_an_engine_short_of_memory_has_fewer_running_places() -> None:
    in_flight = InFlight(max_sequences=4)
    for name in "abcd":
        in_flight.open(name, Ignoring())
    in_flight.record(report(running=2, waiting=2))
    assert in_flight.num_queued == 2
    ended = TokenOutput(request_id="a", token_ids=[1], finish_reason=FinishReason.LENGTH)
    in_flight.record(report(ended, running=1, waiting=2))  # the finished request freed its place
    assert in_flight.num_queued == 1


def test_the_rate_is_unbiased_from_the_start_and_follows_a_change() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.per_second() == 0.0
    for _ in range(8):
        now += 0.25
        rate.add(1)
    assert rate.per_second() == pytest.approx(4, rel=0.1)
    now += 300
    assert rate.per_second() < 0.01


@pytest.mark.parametrize(("queue", "rate", "seconds"), [(100, 10.0, 5), (3, 100.0, 1), (1000, 0.1, 60), (10, 0.0, 60)])
def test_retry_after_is_the_time_to_drain_half_the_queue(queue: int, rate: float, seconds: int) -> None:
    assert queue_limit.retry_after(queue, rate) == seconds
