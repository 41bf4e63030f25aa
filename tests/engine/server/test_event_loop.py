"""However much a client sends, others are answered meanwhile: nothing long is done in the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from engine.server.serving import Serving
from fastgen.server.serving.encoding import encode, encode_bad_words
from fastgen.text.tokenizer import Tokenizer

# Of the time that the work takes. Where it is done in the event loop, that is silent for nearly all of it.
MOST_SILENCE = 0.8


async def longest_silence(work: Callable[[], Awaitable[object]]) -> float:
    """The longest that the event loop does nothing else while it awaits the work, as a part of the work's time."""
    silences, last = [0.0], time.perf_counter()

    async def listen() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            silences.append(now - last)
            last = now

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    await asyncio.sleep(0.002)
    listening.cancel()
    return max(silences) / took


@pytest.mark.parametrize("texts", [["word " * 400_000], ["word " * 800] * 500], ids=["a long one", "many"])
async def test_texts_are_encoded_beside_the_event_loop(smollm2: Tokenizer, texts: list[str]) -> None:
    assert await longest_silence(lambda: encode(smollm2, texts, add_special_tokens=True)) < MOST_SILENCE


async def test_bad_words_are_encoded_beside_the_event_loop(smollm2: Tokenizer) -> None:
    words = [f"{number:04d}" + " word" * 200 for number in range(1000)]
    assert await longest_silence(lambda: encode_bad_words(words, smollm2)) < MOST_SILENCE


def test_probes_are_answered_while_a_million_prompts_are_refused(scripted: Serving) -> None:
    body = {"prompt": [[1]] * 1_000_000}
    statuses: list[int] = []
    sender = threading.Thread(target=lambda: statuses.append(scripted.post("/v1/completions", body).status_code))
    sender.start()
    while sender.is_alive():
        assert scripted.get("/health").status_code == 200  # within ten seconds, or it raises
    assert statuses == [400]
