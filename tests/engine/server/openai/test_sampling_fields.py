"""Sampling fields, from the request body to the engine's parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.openai.generation_request import ChatRequest, CompletionRequest, GenerationRequest
from fastgen.server.serving.encoding import encode_bad_words
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Vocabulary

GIVEN: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40.0,
    "min_p": 0.05,
    "typical_p": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "logit_bias": {"17": -100, "5": 2.5},
    "seed": 7,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [4, 5],
    "prompt_logprobs": 2,
}


def test_every_sampling_parameter_is_a_field_of_both_endpoints() -> None:
    endpoint_specific = {"logprobs", "grammar"}
    assert {parameter.name for parameter in fields(SamplingParams)} - endpoint_specific <= set(
        GenerationRequest.model_fields
    )


@pytest.mark.parametrize(
    "body", [CompletionRequest(prompt="a", **GIVEN), ChatRequest(messages=messages_for("a"), **GIVEN)]
)
def test_every_sampling_field_reaches_the_engine(body: CompletionRequest | ChatRequest) -> None:
    assert body.sampling(9, logprobs=1, bad_words=((1, 2),)) == SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        typical_p=0.8,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((5, 2.5), (17, -100.0)),
        seed=7,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=(4, 5),
        prompt_logprobs=2,
        logprobs=1,
        bad_words=((1, 2),),
    )


def test_missing_and_null_fields_get_openais_defaults() -> None:
    assert CompletionRequest(prompt="a").sampling(16) == SamplingParams(max_tokens=16)
    assert CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(GIVEN)}).sampling(16) == SamplingParams()


def test_fields_of_scheduling_and_of_the_text_are_mapped() -> None:
    body = CompletionRequest.model_validate(
        {
            "prompt": "a", "priority": -2, "timeout": 1.5, "cache_salt": "me", "stop": "x", "min_tokens": 2,
            "include_stop_str_in_output": True, "skip_special_tokens": False,
        }
    )  # fmt: skip
    request = body.engine_request([1, 2], SamplingParams())
    assert (request.priority, request.deadline_seconds, request.cache_salt) == (-2, 1.5, "me")
    assert body.sampling(16).min_tokens == 2
    meaning = RenderedRequest(requests=[request], stop=("x",), include_stop=True, skip_special_tokens=False)
    assert body.rendered([request]) == meaning


async def test_a_bad_word_is_encoded_with_and_without_a_leading_space(smollm2: Tokenizer) -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(smollm2.encode(text, add_special_tokens=False))

    assert await encode_bad_words(["cat", "cat"], smollm2) == (encode("cat"), encode(" cat"))


async def test_a_bad_word_is_also_encoded_without_the_space_that_a_tokenizer_prepends() -> None:
    names = ["<unk>", "\u2581", "h", "i", "hi", "\u2581hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {name: token for token, name in enumerate(names)}
    merges = [("h", "i"), ("\u2581", "hi")]
    backend = Backend(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, Vocabulary(backend), None, None, None)
    assert (ids["hi"],) in await encode_bad_words(["hi"], tokenizer)
    assert (ids["\u2581hi"],) in await encode_bad_words(["hi"], tokenizer)


def test_negative_seeds_are_mapped_and_minus_one_is_random() -> None:
    def seed(given: int) -> int | None:
        return CompletionRequest.model_validate({"prompt": "a", "seed": given}).sampling(1).seed

    assert seed(7) == 7
    assert seed(-1) is None
    seeds = [seed(given) for given in (-2, -3, -(1 << 63))]
    assert len(set(seeds)) == 3
    assert all(value is not None and value >= 0 for value in seeds)


def test_stop_strings_respect_include_stop_str_in_output_and_min_tokens(scripted: Serving) -> None:
    body = {"prompt": prompt_for("one two one two"), "stop": ["two"]}

    def text(**fields: Any) -> str:
        choice = scripted.post("/v1/completions", {**body, **fields}).json()["choices"][0]
        assert choice["stop_reason"] == "two"
        return str(choice["text"])

    assert text() == "one "
    assert text(include_stop_str_in_output=True) == "one two"
    assert text(min_tokens=3) == "one two one "


@pytest.mark.parametrize(("stop", "text"), [("<repo_name>", "one"), ("e<repo_name>t", "on"), ("<filename>", "onetwo")])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_may_name_a_special_token(scripted: Serving, stop: str, text: str, keeps: bool) -> None:
    body = {"stop": [stop], "include_stop_str_in_output": keeps, "max_tokens": 9}
    found = stop if stop != "<filename>" else None
    shown = text + (found or "") if keeps else text
    prompt = {"prompt": prompt_for("one<repo_name>two")}
    whole = scripted.post("/v1/completions", {**prompt, **body}).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (shown, "stop", found)
    streamed = scripted.client().completions.create(model="smollm2", stream=True, **prompt, extra_body=body)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in streamed) == shown
    chat = scripted.post("/v1/chat/completions", {"messages": messages_for("one<repo_name>two"), **body}).json()
    assert (chat["choices"][0]["message"]["content"], chat["choices"][0]["stop_reason"]) == (shown, found)


def test_special_tokens_can_be_shown(scripted: Serving) -> None:
    body = {"prompt": "one<repo_name>two", "max_tokens": 3}
    assert scripted.post("/v1/completions", body).json()["choices"][0]["text"] == "onetwo"
    shown = scripted.post("/v1/completions", {**body, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "one<repo_name>two"


def test_stop_reason_names_the_stop_token(scripted: Serving) -> None:
    body = {"prompt": [504, 2365, 28], "max_tokens": 9, "stop_token_ids": [2365]}
    choice = scripted.post("/v1/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 2365)
