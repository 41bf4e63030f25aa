"""A message that the engine process cannot read ends at most its own request, with an error."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fastgen.link.launch
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.link.client import EngineClient
from fastgen.link.launch import Launch
from fastgen.link.messages import Add, TokenOutput
from fastgen.link.shared_counts import Counts
from fastgen.settings import EngineConfig
from support.demo_weights import demo_model
from support.waiting import HANG_SECONDS

SCRIPTED = Path(__file__).parents[1] / "server" / "scripted_engine.py"


@dataclass
class Collected:
    """The outputs of one request."""

    outputs: list[TokenOutput] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def fail(self) -> None:
        self.ended.set()

    async def end(self) -> FinishReason | None:
        await asyncio.wait_for(self.ended.wait(), HANG_SECONDS)
        return self.outputs[-1].finish_reason if self.outputs else None


@asynccontextmanager
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    """Start the engine's process, with a scripted model."""
    monkeypatch.setattr(fastgen.link.launch, "WORKER", (sys.executable, str(SCRIPTED)))
    client = await EngineClient.start(
        Launch("text"),
        EngineConfig(model=str(demo_model()), token_budget=16, max_sequences=4),
        lambda _stage, _fraction: None,
        on_report=lambda _report: None,
        step_timeout=600,
        counts=Counts.of_only_process(),
    )
    try:
        yield client
    finally:
        await client.stop()


def request(name: str, **sampling: Any) -> Request:
    return Request(id=name, prompt_token_ids=[7, 8], sampling=SamplingParams(ignore_eos=True, **sampling))


def altered(name: str, **changes: Any) -> dict[str, Any]:
    """Return an `Add` with other values in its sampling parameters."""
    message: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(Add(request(name))))
    message["request"]["sampling"] |= changes
    return message


BAD: Mapping[str, Mapping[str, Any]] = {
    "a float for an integer": {"top_k": 50.0},
    "a boolean for an integer": {"max_tokens": True},
    "a text for a number": {"temperature": "hot"},
    "out of range": {"temperature": -1},
    "over 2^63": {"top_k": 1 << 63},
    "no ids": {"grammar": {"kind": "tokens", "text": "x"}},
}


async def test_a_request_that_the_engine_cannot_read_ends_alone_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(monkeypatch) as client:
        for name, changes in BAD.items():
            other, bad = Collected(), Collected()
            client.start_request(request("other", max_tokens=30), other)
            client.in_flight.open(name, bad)
            client._send(altered(name, **changes))  # type: ignore[arg-type]
            assert await bad.end() is FinishReason.REJECTED, name
            assert await other.end() is FinishReason.LENGTH, name
            assert sum(len(output.token_ids) for output in other.outputs) == 30


async def test_other_messages_that_the_engine_cannot_read_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(monkeypatch) as client:
        for message in ({"type": "cancel", "request_id": 5}, {"type": "gone", "client": 9}, {"type": "new"}, {}, [], 7):
            client._send(message)  # type: ignore[arg-type]
        client._socket.send(b"\xc1 no message")
        client._socket.send(b"")
        other = Collected()
        client.start_request(request("other"), other)
        assert await other.end() is FinishReason.LENGTH
        client._send({"type": "watch", "on": 3})  # type: ignore[arg-type]
        async with asyncio.timeout(HANG_SECONDS):  # otherwise the engine would seem to hang
            while client._owes_report:
                await asyncio.sleep(0.01)
        assert client.alive
