"""What clients can make the server hold is bounded: bodies, prompts and log-probabilities (decision 042)."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.server.serving import Serving, serving
from fastgen.core.request import Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.http.api_error import APIError
from fastgen.server.http.body_limit import SMALL_BYTES, BodyBudget, BodyLimit
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.serving.held_memory import MOST_LOGPROBS_HELD, HeldMemory, held_bytes, most_logprob_tokens
from support.waiting import HANG_SECONDS, wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = ("--max-model-length", "8192", "--max-bodies-size", "48MiB")
    with serving(tmp_path_factory.mktemp("bounded"), *options, environment={"SCRIPT_BLOCKS": "4096"}) as server:
        server.wait_status("/ready", 200)
        server.post("/v1/completions", {"prompt": "a"})
        yield server


def begin(server: Serving, num_bytes: int, *headers: str) -> socket.socket:
    """Send a request without the last byte of its body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
    fields = ["Host: t", "Content-Type: application/json", f"Content-Length: {num_bytes + 1}", *headers]
    connection.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", *fields, "", ""]).encode())
    connection.sendall(b'{"prompt":"' + b"a" * (num_bytes - 11))
    return connection


def first_line(connection: socket.socket) -> bytes:
    return connection.recv(4096)


@pytest.mark.slow
def test_unfinished_bodies_hold_no_more_than_the_budget(bounded: Serving) -> None:
    """Without the budget, twelve bodies of 15 MiB hold 180 MiB, and sixty more than a gigabyte."""
    before = bounded.resident_bytes()
    with ExitStack() as stack:
        connections = [stack.enter_context(begin(bounded, 15 * MIB)) for _ in range(12)]
        wait_until(
            lambda: bounded.metric("fastgen_request_rejected_total", 0, reason="bodies_too_large") >= 9, "rejections"
        )
        wait_until(lambda: bounded.resident_bytes() - before < 100 * MIB, "their memory to be free")
        assert bounded.post("/v1/completions", {"prompt": "a"}).status_code == 200, "small bodies are always received"
        assert bounded.post("/tokenize", {"prompt": "a " * (MIB // 4)}).status_code == 200, "the largest are rejected"
        wait_until(lambda: len(select.select(connections, [], [], 0)[0]) >= 9, "their responses")
        rejected = [first_line(other) for other in select.select(connections, [], [], 0)[0]]
        assert all(line.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in line for line in rejected)
    wait_until(lambda: bounded.get("/load").json()["server_load"] == 0, "the requests to end")
    with begin(bounded, 15 * MIB) as connection:
        connection.sendall(b'"')
        assert first_line(connection).startswith(b"HTTP/1.1 400"), "what the others held is free again"


@pytest.mark.slow
def test_a_key_is_asked_for_before_the_body_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        serving(tmp_path_factory.mktemp("keyed"), environment={"FASTGEN_API_KEY": "k"}) as server,
        ExitStack() as stack,
    ):
        server.wait_status("/ready", 200)
        before = server.resident_bytes()
        for header in ("X: y", "Authorization: Bearer wrong", "Expect: 100-continue"):
            for _ in range(4):
                connection = stack.enter_context(begin(server, 8 * MIB, header))
                assert first_line(connection).startswith(b"HTTP/1.1 401"), "before the body is complete"
        assert server.resident_bytes() - before < 16 * MIB


@pytest.mark.slow
def test_the_log_probabilities_of_a_request_hold_a_bounded_memory(bounded: Serving) -> None:
    before = bounded.resident_bytes()
    prompts = [[5000] * 6000] * 2  # as many as are accepted
    body = {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 1}
    assert len(bounded.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]) == 6000
    assert bounded.resident_bytes() - before < 160 * MIB


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": [[5000] * 8000] * 4, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("completions", {"prompt": [[5000] * 8000] * 4, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
        ("completions", {"prompt": [5000] * 4000, "prompt_logprobs": 0, "n": 128}, "prompt_logprobs"),
        ("completions", {"prompt": [5000] * 2000, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ("completions", {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 1000}, "logprobs"),
        ("completions", {"prompt": ["a"] * 64, "logprobs": 20, "max_tokens": 1000}, "logprobs"),
        ("completions", {"prompt": "a", "best_of": 128, "max_tokens": 4000}, "best_of"),
        ("completions", {"prompt": [[5000] * 8000] * 8, "n": 100}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 16, "logprobs": True,
                              "top_logprobs": 20, "max_tokens": 1000}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}], "n": 8, "prompt_logprobs": 20,
                              "max_tokens": 1}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_too_many_log_probabilities_are_rejected_by_the_name_of_the_field(
    bounded: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    response = bounded.post(f"/v1/{path}", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert " may have at most " in error["message"]


def test_a_chat_with_log_probabilities_and_without_max_tokens_is_shortened(bounded: Serving) -> None:
    """Its longest answer would have too many, but few answers are that long."""
    message = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 4}
    choices = bounded.post("/v1/chat/completions", {**message, "ignore_eos": True}).json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [MOST_LOGPROBS_HELD // (4 * 21)] * 4
    assert most_logprob_tokens(None, 4) == float("inf")


def request(num_tokens: int, **sampling: Any) -> Request:
    return Request(id="", prompt_token_ids=[1] * num_tokens, sampling=SamplingParams(**sampling))


def test_each_generation_holds_its_prompt_and_its_log_probabilities() -> None:
    requests = [request(10, max_tokens=5, logprobs=2, prompt_logprobs=1), request(20, max_tokens=5)]
    assert held_bytes(requests, 3) == 90 * 80 + (10 * 2 * 3 + 5 * 3 * 3) * 250


@pytest.mark.parametrize(
    ("most", "num_candidates", "too_many", "param"),
    [
        (request(1 << 10), 1 << 12, request((1 << 10) + 1), "prompt"),
        (request(1 << 18, prompt_logprobs=0), 1, request((1 << 18) + 1, prompt_logprobs=0), "prompt_logprobs"),
        (request(1, max_tokens=1 << 18, logprobs=0), 1, request(1, max_tokens=(1 << 18) + 1, logprobs=0), "logprobs"),
    ],
)
def test_one_request_may_hold_only_so_much(most: Request, num_candidates: int, too_many: Request, param: str) -> None:
    assert held_bytes([most], num_candidates) > 0
    with pytest.raises(RequestError, match=f"^{param}: "):
        held_bytes([too_many], num_candidates)


def test_the_memory_of_all_requests_is_bounded_and_one_alone_is_admitted() -> None:
    memory = HeldMemory(100)
    memory.take(150)
    with pytest.raises(APIError) as raised:
        memory.take(1)
    assert (raised.value.status, raised.value.retry_after) == (503, 5)
    memory.release(150)
    memory.take(60)
    memory.take(40)
    assert memory.num_bytes == 100


def test_a_request_holds_its_memory_until_it_ends(bounded: Serving) -> None:
    """Sixteen requests in turn hold as much as the limit of each; none is rejected."""
    body = {"prompt": [5000] * 4000, "prompt_logprobs": 20, "max_tokens": 1}
    assert {bounded.post("/v1/completions", body).status_code for _ in range(8)} == {200}
    assert bounded.post("/v1/completions", {**body, "prompt": [10**6] * 4000}).status_code == 400


class Body:
    """A request whose body arrives when the test says so, behind the limit."""

    def __init__(self, budget: BodyBudget, max_bytes: int = 1 << 30) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.received: list[Message] = []
        self.done = asyncio.Event()
        limit = BodyLimit(self._read, max_bytes, budget)
        scope = {"type": "http", "headers": []}
        self.task = asyncio.create_task(limit(scope, self.messages.get, self._send))

    async def _read(self, _scope: Scope, receive: Receive, _send: Send) -> None:
        while True:
            message = await receive()
            self.received.append(message)
            if not message["more_body"]:
                await self.done.wait()
                return

    async def _send(self, _message: Message) -> None:
        raise AssertionError

    async def arrives(self, num_bytes: int, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": bytes(num_bytes), "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        """The status of its rejection, if it was rejected."""
        error = self.task.exception() if self.task.done() else None
        return error.status if isinstance(error, APIError) else None


async def test_the_largest_unfinished_body_is_rejected() -> None:
    budget = BodyBudget(10 * MIB)
    complete, large, small, newest = (Body(budget) for _ in range(4))
    await complete.arrives(6 * MIB, more=False)
    await large.arrives(2 * MIB)
    await large.arrives(MIB)
    await small.arrives(SMALL_BYTES)
    await newest.arrives(MIB)
    assert (complete.status, large.status, small.status, newest.status) == (None, 503, None, None)
    assert budget.num_bytes == 7 * MIB + SMALL_BYTES
    await newest.arrives(4 * MIB)
    assert newest.status == 503
    await small.arrives(SMALL_BYTES, more=False)
    complete.done.set()
    small.done.set()
    await asyncio.gather(complete.task, small.task)
    assert budget.num_bytes == 0


async def test_a_body_that_alone_exceeds_the_budget_is_rejected_when_it_does() -> None:
    budget = BodyBudget(MIB)
    body = Body(budget)
    await body.arrives(2 * MIB, more=False)
    assert (body.status, body.received, budget.num_bytes) == (503, [], 0)


async def test_small_bodies_are_received_beyond_the_budget() -> None:
    budget = BodyBudget(1)
    bodies = [Body(budget) for _ in range(3)]
    for body in bodies:
        await body.arrives(SMALL_BYTES, more=False)
        assert body.status is None
        body.done.set()
    await asyncio.gather(*(body.task for body in bodies))
    assert budget.num_bytes == 0


@pytest.mark.parametrize(
    "metadata",
    [{str(number): "a" for number in range(17)}, {"a": "x" * 513}, {"a" * 65: "x"}, {"a": ["x"]}, ["x"]],
    ids=["keys", "a long value", "a long key", "a list", "no object"],
)
def test_metadata_that_responses_repeat_is_limited(bounded: Serving, metadata: object) -> None:
    response = bounded.post("/v1/responses", {"input": "a", "metadata": metadata})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")


def test_an_ignored_field_is_not_kept() -> None:
    fields = {"messages": [{"role": "user", "content": "a"}], "user": "x" * 1000, "metadata": {"a": "x" * 1000}}
    assert "xx" not in repr(ChatRequest.model_validate(fields))
