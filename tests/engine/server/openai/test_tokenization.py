"""/tokenize and /detokenize."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from fastapi import Request

from engine.server.serving import Serving
from fastgen.server.openai import tokenization
from fastgen.server.openai.tokenization import TokenizeRequest
from support.waiting import HANG_SECONDS

HELLO = "Hello, wörld! 👋🏽 <|im_end|>"
CHAT = [{"role": "user", "content": "Hi"}]


def test_tokenize_and_detokenize_round_trip(scripted: Serving) -> None:
    got = scripted.post("/tokenize", {"model": "smollm2", "prompt": HELLO}).json()
    assert set(got) == {"count", "max_model_len", "tokens"}
    assert got["count"] == len(got["tokens"]) > 5
    assert got["max_model_len"] == 512
    assert scripted.post("/detokenize", {"model": "smollm2", "tokens": got["tokens"]}).json() == {"prompt": HELLO}


def test_tokenize_counts_a_conversation_like_the_chat_endpoint(scripted: Serving) -> None:
    counted = scripted.post("/tokenize", {"messages": CHAT}).json()["count"]
    answered = scripted.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}).json()
    assert counted == answered["usage"]["prompt_tokens"]


def test_token_strings_are_returned_on_request(scripted: Serving) -> None:
    got = scripted.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert got["token_strs"] == ["a", "Ġb"]


def test_tokenize_accepts_texts_longer_than_the_model(scripted: Serving) -> None:
    assert scripted.post("/tokenize", {"prompt": "word " * 20_000}).json()["count"] > 20_000


def test_tokenize_rejects_texts_that_would_occupy_a_core_for_long(scripted: Serving) -> None:
    response = scripted.post("/tokenize", {"prompt": "x" * 2_000_000})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt: 2000000 bytes of text cannot fit")


async def test_tokenizing_stops_when_the_client_leaves() -> None:
    released, encoded = threading.Event(), list[int]()

    def encode_unlocked(texts: list[str], **_others: bool) -> list[list[int]]:
        encoded.append(len(texts))
        released.wait(HANG_SECONDS)
        return [[1]] * len(texts)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    model = SimpleNamespace(
        tokenizer=SimpleNamespace(encode_unlocked=encode_unlocked), prompt_size_limit=SimpleNamespace(check=print)
    )
    service = SimpleNamespace(
        lifecycle=SimpleNamespace(model=lambda: model), check_model=str, check_chat_template=lambda _source: None
    )
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    request = Request({"type": "http", "app": app}, receive)
    response = await tokenization.tokenize(TokenizeRequest(prompt="a" * 5000), request)
    assert response.status_code == 499
    released.set()
    assert len(encoded) <= 1


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [49152]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["5"]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {"tokens": [1], "model": "unknown"}, "model"),
])  # fmt: skip
def test_an_invalid_tokenization_field_is_named(
    scripted: Serving, path: str, body: dict[str, object], param: str
) -> None:
    response = scripted.post(path, body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
