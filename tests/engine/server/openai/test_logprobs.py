"""Logprobs of generated and echoed tokens in OpenAI's formats."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.scripted_engine import scripted_logprobs
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving

PROMPT = [504, 2365, 28, 901]


def complete(server: Serving, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_completion_logprobs_have_text_offset_and_logprob_per_token(scripted: Serving) -> None:
    choice = complete(scripted, prompt=PROMPT, max_tokens=4, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [scripted_logprobs(token, 2).logprob for token in PROMPT]
    offsets = [len("".join(logprobs["tokens"][:place])) for place in range(4)]
    assert logprobs["text_offset"] == offsets
    for text, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[text] == logprob
        assert 2 <= len(top) <= 3


def test_streamed_completion_logprobs_add_up_to_the_complete_ones(scripted: Serving) -> None:
    body: dict[str, Any] = {"prompt": "Hello, wörld! 👋🏽", "max_tokens": 30, "logprobs": 1, "echo": True}
    full = complete(scripted, **body)["choices"][0]
    chunks = list(scripted.client().completions.create(model="smollm2", stream=True, **body))
    assert "".join(chunk.choices[0].text for chunk in chunks) == full["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks if chunk.choices[0].logprobs]
        assert [entry for piece in pieces for entry in piece] == full["logprobs"][name]


def test_echo_starts_with_the_prompt(scripted: Serving) -> None:
    plain = complete(scripted, prompt="one two", max_tokens=2, echo=True)["choices"][0]
    assert plain["text"] == "one twoone two"
    assert plain["logprobs"] is None
    tokens = complete(scripted, prompt=[PROMPT], max_tokens=1, echo=True, n=2)["choices"]
    assert tokens[0]["text"] == tokens[1]["text"]
    assert len(tokens[0]["text"]) > 4


@pytest.mark.parametrize("prompt", ["<|im_start|>a b", "a<|im_end|> wörld 👋🏽<|im_start|>", "one two"])
def test_offsets_of_echoed_prompt_tokens_match_the_prompt_text(scripted: Serving, prompt: str) -> None:
    choice = complete(scripted, prompt=prompt, max_tokens=1, echo=True, logprobs=0)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt)
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(prompt), "offset of the generated token"
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and offset < len(prompt):
            assert choice["text"][offset:].startswith(token)


def test_a_prompt_is_scored_as_evaluation_harnesses_request_it(scripted: Serving) -> None:
    """Send lm-evaluation-harness requests (token ids, echo, one logprob) and read the replies as it does."""
    context, continuation = [PROMPT, PROMPT[:2]], [[28, 901], [504]]
    prompts = [c + t for c, t in zip(context, continuation, strict=True)]
    body = {"prompt": prompts, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    scored = complete(scripted, **body, max_tokens=0)
    generated = complete(scripted, **body, max_tokens=1)
    for place, choice in enumerate(scored["choices"]):
        logprobs, begin = choice["logprobs"], len(context[place])
        assert len(logprobs["tokens"]) == len(prompts[place])
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["token_logprobs"][begin:] == [scripted_logprobs(t, 1).logprob for t in continuation[place]]
        greedy = [
            logprob == max(top.values())
            for logprob, top in zip(logprobs["token_logprobs"][begin:], logprobs["top_logprobs"][begin:], strict=True)
        ]
        assert greedy == [token % 2 == 0 for token in continuation[place]]
        # Older versions request one generated token, and the harness drops the last entry.
        longer = generated["choices"][place]["logprobs"]
        assert {name: values[:-1] for name, values in longer.items()} == logprobs
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_have_bytes(scripted: Serving) -> None:
    done = scripted.client().chat.completions.create(
        model="smollm2", messages=messages_for("héllo 👋🏽"), logprobs=True, top_logprobs=3
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    *text, end = logprobs.content
    spelled = b"".join(bytes(token.bytes or []) for token in text)
    assert spelled.decode() == done.choices[0].message.content == "héllo 👋🏽"
    assert end.token == "<|im_end|>"  # every completion token has an entry
    assert done.usage is not None
    assert done.usage.completion_tokens == len(logprobs.content)
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)


def test_streamed_chat_logprobs_equal_the_complete_ones(scripted: Serving) -> None:
    body: dict[str, Any] = {
        "model": "smollm2", "messages": messages_for("héllo 👋🏽 you"),
        "logprobs": True, "top_logprobs": 1, "stop": ["zz"],
    }  # fmt: skip
    full = scripted.client().chat.completions.create(**body)
    chunks = list(scripted.client().chat.completions.create(**body, stream=True))
    streamed = [
        token for chunk in chunks for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert full.choices[0].logprobs is not None
    assert streamed == full.choices[0].logprobs.content


def test_logprobs_can_name_tokens_by_id(scripted: Serving) -> None:
    choice = complete(scripted, prompt=PROMPT, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:504", "token_id:2365"]


def test_a_token_that_is_not_utf8_is_named_by_its_bytes(scripted: Serving) -> None:
    choice = complete(scripted, prompt="👋🏽", max_tokens=3, logprobs=0)["choices"][0]
    assert choice["logprobs"]["tokens"][0].startswith("bytes:\\xf0")


def test_prompt_logprobs_are_keyed_by_token_id_with_ranks(scripted: Serving) -> None:
    choice = complete(scripted, prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [rest[i][str(token)]["rank"] for i, token in enumerate(PROMPT[1:])] == [t % 2 + 1 for t in PROMPT[1:]]
    chat = scripted.post("/v1/chat/completions", {"messages": messages_for("a"), "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21, "echo": True}, "logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": 1}, "logprobs"),
    ],
)
def test_invalid_logprobs_fields_are_rejected(scripted: Serving, path: str, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": prompt_for("a"), "messages": messages_for("a"), **fields}
    response = scripted.post(f"/v1/{path}", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert param in response.json()["error"]["message"]
