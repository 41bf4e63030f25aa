"""Large requests do not block the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from engine.server.serving import Serving
from fastgen.server.serving.encoding import encode, encode_bad_words
from fastgen.text.tokenizer import Tokenizer
from support.waiting import HANG_SECONDS

# Share of the work's duration. Work inside the event loop blocks it for nearly all of that time.
MAX_BLOCKED_SHARE = 0.8
# The work blocks the loop each time or never; the machine may stop this process at any time.
MOST_ATTEMPTS = 10


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


async def assert_not_blocked(work: Callable[[], Awaitable[object]]) -> None:
    """Fail if the event loop is blocked in each of several attempts."""
    shares: list[float] = []
    while len(shares) < MOST_ATTEMPTS and (not shares or shares[-1] >= MAX_BLOCKED_SHARE):
        shares.append(await longest_block(work))
    assert shares[-1] < MAX_BLOCKED_SHARE, shares


@pytest.mark.slow
@pytest.mark.parametrize("texts", [["word " * 400_000], ["word " * 800] * 500], ids=["a long one", "many"])
async def test_long_texts_are_encoded_off_the_event_loop(smollm2: Tokenizer, texts: list[str]) -> None:
    await assert_not_blocked(lambda: encode(smollm2, texts, add_special_tokens=True))


@pytest.mark.slow
async def test_bad_words_are_encoded_off_the_event_loop(smollm2: Tokenizer) -> None:
    words = [f"{number:04d}" + " word" * 200 for number in range(1000)]
    await assert_not_blocked(lambda: encode_bad_words(words, smollm2))


class Paused:
    """A tokenizer that encodes nothing until it is released, and records the texts of each group."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.groups: list[list[str]] = []

    def encode_unlocked(self, texts: list[str], **_others: bool) -> list[list[int]]:
        self.groups.append(texts)
        self.begun.set()
        self.released.wait(HANG_SECONDS)
        return [[len(text)] for text in texts]


async def test_encoding_stops_between_two_groups_when_the_client_leaves() -> None:
    slow = Paused()
    encoding = asyncio.create_task(encode(cast(Tokenizer, slow), ["a" * 50_000, "b" * 50_000], add_special_tokens=True))
    assert await asyncio.to_thread(slow.begun.wait, HANG_SECONDS)
    encoding.cancel()
    await asyncio.gather(encoding, return_exceptions=True)
    slow.released.set()
    later = Paused()
    later.released.set()
    assert await encode(cast(Tokenizer, later), ["c" * 5000, "d"], add_special_tokens=True) == [[5000], [1]]
    assert [len(group) for group in slow.groups] == [1]


async def test_a_short_text_does_not_wait_for_long_ones() -> None:
    slow, quick = Paused(), Paused()
    quick.released.set()
    long = [
        asyncio.create_task(encode(cast(Tokenizer, slow), ["a" * 100_000], add_special_tokens=True)) for _ in range(3)
    ]
    assert await asyncio.to_thread(slow.begun.wait, HANG_SECONDS)
    assert await encode(cast(Tokenizer, quick), ["b" * 5000], add_special_tokens=True) == [[5000]]
    assert len(slow.groups) == 1, "long texts take turns, so that the engine keeps its cores"
    slow.released.set()
    await asyncio.gather(*long)


@pytest.mark.parametrize(
    ("path", "field", "nested"),
    [("/v1/completions", "prompt", False), ("/v1/completions", "prompt", True), ("/detokenize", "tokens", False)],
    ids=["prompt", "nested prompt", "tokens"],
)
def test_a_list_of_too_many_tokens_is_rejected_by_its_length(
    scripted: Serving, path: str, field: str, nested: bool
) -> None:
    tokens = [1] * 900_000
    response = scripted.post(path, {field: [tokens] if nested else tokens})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (f"{field}: 900000 tokens; the model takes at most 512; send fewer")
