"""Texts that are too long are rejected before they are encoded."""

from __future__ import annotations

import pytest

from engine.server.serving import Serving
from fastgen.core.request_error import RequestError
from fastgen.model.source import ModelSource
from fastgen.server.serving.encoding import PromptSizeLimit
from fastgen.text.tokenizer import Tokenizer
from support.demo_weights import demo_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ModelSource.open(str(demo_model())).tokenizer)


def test_a_text_that_fits_is_never_rejected(tokenizer: Tokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.vocabulary.token_bytes(token)))
    text = tokenizer.decode([longest] * 64)
    PromptSizeLimit(tokenizer, 64).check(text, "prompt")
    PromptSizeLimit(tokenizer, 64).check("👋🏽" * 64, "prompt")


def test_a_text_that_cannot_fit_is_rejected_by_its_size(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt: 1000000 bytes of text cannot fit in the model's 64 tokens"):
        PromptSizeLimit(tokenizer, 64).check("x" * 1_000_000, "prompt")


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/completions", {"prompt": "x" * 10_000_000}, "prompt"),
    ("/v1/completions", {"prompt": ["a", "x" * 10_000_000]}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
])  # fmt: skip
def test_ten_megabytes_are_rejected_without_encoding(
    scripted: Serving, path: str, body: dict[str, object], param: str
) -> None:
    response = scripted.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert "bytes of text cannot fit in the model's 512 tokens" in response.json()["error"]["message"]
