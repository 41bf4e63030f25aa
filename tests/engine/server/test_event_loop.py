"""Large requests do not block the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from engine.server.serving import Serving
from fastgen.server.http import body_limit
from fastgen.server.serving.encoding import encode, encode_bad_words
from fastgen.text.tokenizer import Tokenizer

# Share of the work's duration. Work inside the event loop blocks it for nearly all of that time.
MAX_BLOCKED_SHARE = 0.8


async def longest_block(work: Callable[[], Awaitable[object]]) -> float:
    """Return the longest time the event loop is blocked during `work`, as a share of the work's duration."""
    gaps, last = [0.0], time.perf_counter()

    async def listen() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    await asyncio.sleep(0.002)
    listening.cancel()
    return max(gaps) / took


@pytest.mark.slow
@pytest.mark.parametrize("texts", [["word " * 400_000], ["word " * 800] * 500], ids=["a long one", "many"])
async def test_long_texts_are_encoded_off_the_event_loop(smollm2: Tokenizer, texts: list[str]) -> None:
    assert await longest_block(lambda: encode(smollm2, texts, add_special_tokens=True)) < MAX_BLOCKED_SHARE


@pytest.mark.slow
async def test_bad_words_are_encoded_off_the_event_loop(smollm2: Tokenizer) -> None:
    words = [f"{number:04d}" + " word" * 200 for number in range(1000)]
    assert await longest_block(lambda: encode_bad_words(words, smollm2)) < MAX_BLOCKED_SHARE


async def test_encoding_stops_between_two_texts_when_the_client_leaves(smollm2: Tokenizer) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Slow:
        def encode_unlocked(self, _texts: list[str], *, cancelled: threading.Event, **_others: bool) -> list[list[int]]:
            begun.set()
            if cancelled.wait(20):
                ended.set()
            return []

    encoding = asyncio.create_task(encode(cast(Tokenizer, Slow()), ["a" * 5000, "b"], add_special_tokens=True))
    assert await asyncio.to_thread(begun.wait, 10)
    encoding.cancel()
    await asyncio.gather(encoding, return_exceptions=True)
    assert await asyncio.to_thread(ended.wait, 10)
    assert smollm2.encode_unlocked(["a", "b"], add_special_tokens=True, cancelled=ended) == []


async def test_only_large_bodies_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def parse(body: bytes) -> int:
        threads.append(threading.current_thread() is not threading.main_thread())
        return len(body)

    monkeypatch.setattr(body_limit, "parse", parse)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"[" + b" " * (size - 2) + b"]", "more_body": False}

    for size in (100, body_limit._LARGE_BODY + 1):
        assert await body_limit._JSONRequest({"type": "http"}, receive).json() == size
    assert threads == [False, True]


def test_probes_respond_while_a_million_prompts_are_rejected(scripted: Serving) -> None:
    assert statuses_while_probed(scripted, "/v1/completions", {"prompt": [[1]] * 1_000_000}) == [400]


@pytest.mark.parametrize(
    ("path", "field", "nested"),
    [("/v1/completions", "prompt", False), ("/v1/completions", "prompt", True), ("/detokenize", "tokens", False)],
    ids=["prompt", "nested prompt", "tokens"],
)
def test_a_list_of_millions_of_tokens_is_rejected_by_its_length(
    scripted: Serving, path: str, field: str, nested: bool
) -> None:
    tokens = [1] * 3_000_000
    response = scripted.post(path, {field: [tokens] if nested else tokens})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (f"{field}: 3000000 tokens; the model takes at most 512; send fewer")


def statuses_while_probed(scripted: Serving, path: str, body: object) -> list[int]:
    """Return the status of a request during which the server responds to probes."""
    statuses: list[int] = []
    sender = threading.Thread(target=lambda: statuses.append(scripted.post(path, body).status_code))
    sender.start()
    while sender.is_alive():
        assert scripted.get("/health").status_code == 200  # raises after ten seconds
    return statuses
