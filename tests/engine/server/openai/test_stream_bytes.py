"""The bytes of streams: what a client gets for scripted outputs of the engine, held against recorded ones.

The recordings in `streams/` are from the implementation that encoded each chunk as a whole. Ids, times and the version
are replaced. To record them again: `RECORD_STREAMS=1 pytest tests/engine/server/openai/test_stream_bytes.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.server.scripted_engine import END, REPLY, scripted_logprobs
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.thinking_model import write_thinking_model
from fastgen.core.request import FinishReason, Request
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_output import TokenLogprobs
from fastgen.core.step_times import StepCoefficients
from fastgen.link.in_flight import InFlight, Receiver
from fastgen.link.messages import StepReport, TokenOutput
from fastgen.model.source import ModelSource
from fastgen.server.app import create_app
from fastgen.server.http.auth import KeyRing
from fastgen.server.serving.encoding import PromptSizeLimit
from fastgen.server.serving.held_memory import HeldMemory
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.service import Service
from fastgen.settings import ServerConfig
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.reasoning.registry import reasoning_format
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.registry import choose_format
from fastgen.version import VERSION

RECORDINGS = Path(__file__).with_name("streams")
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
FLAT_TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEXT = 'One "two" three\n🙂 vier.'
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": prompt_for(TEXT)},
    "length": {"prompt": prompt_for(TEXT), "max_tokens": 3},
    "stop_string": {"prompt": prompt_for(TEXT), "stop": ["three"]},
    "stop_string_kept": {"prompt": prompt_for(TEXT), "stop": ["three"], "include_stop_str_in_output": True},
    "choices": {"prompt": prompt_for("a b c", "d e"), "n": 2, "seed": 0, **USAGE},
    "prompts": {"prompt": [prompt_for("a b"), prompt_for("c d e")], **CONTINUOUS},
    "logprobs": {"prompt": prompt_for(TEXT), "logprobs": 2},
    "echo": {"prompt": prompt_for("a b"), "echo": True},
    "echo_logprobs": {"prompt": prompt_for("a b"), "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    "token_ids": {"prompt": prompt_for("a b"), "return_token_ids": True},
    "special_tokens": {"prompt": prompt_for("a b"), "skip_special_tokens": False},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": messages_for(TEXT)},
    "usage": {"messages": messages_for(TEXT), **USAGE},
    "continuous_usage": {"messages": messages_for("a b"), **CONTINUOUS},
    "choices": {"messages": messages_for("a b c", "d e"), "n": 2, "seed": 0},
    "logprobs": {"messages": messages_for(TEXT), "logprobs": True, "top_logprobs": 2},
    "token_ids": {"messages": messages_for("a b"), "return_token_ids": True},
    "stop_string": {"messages": messages_for(TEXT), "stop": ["three"]},
    "reasoning": {"messages": messages_for(f"{THOUGHT}It is Bern."), **USAGE},
    "reasoning_left_out": {"messages": messages_for(f"{THOUGHT}It is Bern."), "include_reasoning": False},
    "tool_call": {"messages": messages_for(CALL), "tools": TOOLS},
    "reasoning_tool_call": {"messages": messages_for(f"{THOUGHT}So:\n{CALL}"), "tools": TOOLS, "logprobs": True},
    "content_despite_tools": {"messages": messages_for("It is <Bern>."), "tools": TOOLS},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": prompt_for(TEXT)},
    "length": {"input": prompt_for(TEXT), "max_output_tokens": 3},
    "reasoning_tool_call": {"input": prompt_for(f"{THOUGHT}So:\n{CALL}"), "tools": FLAT_TOOLS},
}
CASES = {
    f"{name}_{case}": (path, body)
    for name, path, bodies in (
        ("completions", "/v1/completions", COMPLETIONS),
        ("chat", "/v1/chat/completions", CHATS),
        ("responses", "/v1/responses", RESPONSES),
    )
    for case, body in bodies.items()
}


class PlayedEngine:
    """Generates one token per step and request: the reply between the prompt's REPLY tokens, as the scripted engine."""

    info = SimpleNamespace(
        max_model_length=512, max_sequences=8, vocabulary_size=49152, device="cpu", dtype="bfloat16",
        quantization="int8", deterministic=True,
    )  # fmt: skip
    alive, why_late, exit_message = True, None, "the engine process was killed"

    def __init__(self) -> None:
        self.in_flight = InFlight(8)
        self.requests: dict[str, Request] = {}
        self._num_generated: dict[str, int] = {}

    def start_request(self, request: Request, receiver: Receiver) -> None:
        self.in_flight.open(request.id, receiver)
        self.requests[request.id], self._num_generated[request.id] = request, 0

    def cancel(self, request_id: str) -> None:
        self.in_flight.close(request_id)
        self.requests.pop(request_id, None)

    def step(self) -> None:
        outputs = [self._output(request) for request in list(self.requests.values())]
        self.in_flight.record(StepReport(outputs, StepStats(), SchedulerStats(), StepCoefficients()))

    def _output(self, request: Request) -> TokenOutput:
        number = self._num_generated[request.id]
        self._num_generated[request.id] += 1
        marks = [place for place, token in enumerate(request.prompt_token_ids) if token == REPLY]
        candidate = int(request.id.rpartition("-")[2]) % (len(marks) - 1)
        reply = [*request.prompt_token_ids[marks[candidate] + 1 : marks[candidate + 1]], END]
        token, sampling = reply[number], request.sampling
        finish = FinishReason.STOP if token == END else None
        if finish is None and number + 1 == sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.requests[request.id]
        scored: list[TokenLogprobs] | None = None
        if number == 0 and sampling.prompt_logprobs is not None:
            scored = [scripted_logprobs(other, sampling.prompt_logprobs) for other in request.prompt_token_ids[1:]]
        logprobs = None if sampling.logprobs is None else [scripted_logprobs(token, sampling.logprobs)]
        return TokenOutput(request.id, [token], finish, logprobs, scored, 1 if number == 0 else None)


class Client:
    """The client's end of one request: what was written to it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.writes: list[bytes] = []
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.is_blocked = False

    async def receive(self) -> Any:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        if message["type"] == "http.response.body":
            self.write(message["body"])

    def on_writable(self, callback: Any) -> None:
        """Never blocked."""

    async def drain(self) -> None:
        assert not self.is_blocked

    def write(self, part: bytes) -> None:
        if part:
            self.writes.append(part)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def streamed(tokenizer: Tokenizer, path: str, body: dict[str, Any], *, dies_after: int | None = None) -> Client:
    """Send a request to the application; return what its client gets."""
    engine, lifecycle, metrics = PlayedEngine(), Lifecycle(), Metrics("m")
    lifecycle.begin_serving(
        ServedModel(
            cast(Any, engine),
            tokenizer,
            PromptSizeLimit(tokenizer, 512),
            GrammarChecker(tokenizer),
            choose_format("auto", tokenizer),
            reasoning_format("auto", tokenizer),
        )
    )
    service = Service(("m",), lifecycle, metrics, ServerConfig(), HeldMemory(1 << 29))
    app, client = create_app(service, ServerConfig(), KeyRing(None, {}), None), Client({**body, "stream": True})
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"1")],
        "state": {},
        "extensions": {"fastgen.body": client},
    }
    responding = asyncio.create_task(cast(Any, app(scope, client.receive, client.send)))
    while not (engine.requests or responding.done()):  # encoding runs in a thread
        await asyncio.sleep(0.01)
    await settle()
    num_steps = 0
    while engine.requests and num_steps != dies_after:
        engine.step()
        num_steps += 1
        await settle()
    if engine.requests:
        engine.in_flight.end_all()
    await responding
    return client


def normalised(text: str) -> str:
    """Replace ids, times and the version."""
    text = re.sub(r'"(created|created_at|completed_at)":\d+(\.\d+)?', r'"\1":0', text)
    text = text.replace(f'"fastgen-{VERSION}-', '"fastgen-0-')
    ids: dict[str, str] = {}
    pattern = r"\b(chatcmpl-tool-|call_|msg_|rs_|fc_)([0-9A-Za-z]{6,})"
    return re.sub(pattern, lambda found: ids.setdefault(found[0], f"{found[1]}{len(ids)}"), text)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("thinking")
    write_thinking_model(folder, smollm2)
    return Tokenizer.load(ModelSource.open(str(folder)).tokenizer)


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_has_the_recorded_bytes(tokenizer: Tokenizer, case: str) -> None:
    path, body = CASES[case]
    client = await streamed(tokenizer, path, body)
    check(case, client)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_stream_that_breaks_off_has_the_recorded_bytes(tokenizer: Tokenizer, path: str) -> None:
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    body = {"messages": messages_for(TEXT)} if field is None else {field: prompt_for(TEXT)}
    check(f"broken{path.replace('/', '_')}", await streamed(tokenizer, path, body, dies_after=3))


async def test_grammars_that_cannot_be_checked_now_are_rejected_with_503(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    client = await streamed(tokenizer, "/v1/completions", {"prompt": "a", "guided_regex": "a"})
    assert (client.status, b"retry-after" in client.headers) == (503, True)
    assert json.loads(b"".join(client.writes))["error"]["code"] == "grammars_unavailable"


def check(case: str, client: Client) -> None:
    """Compare what was written with the recording."""
    text, recording = normalised(b"".join(client.writes).decode()), RECORDINGS / f"{case}.txt"
    if os.environ.get("RECORD_STREAMS"):
        recording.parent.mkdir(exist_ok=True)
        recording.write_text(text)
    assert text == recording.read_text()
    assert "data: " in text
