"""Settings, defaults of a model and requests: what the server accepts is a message that the engine can read."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fastgen.core.request import Pooling, Request
from fastgen.core.request_error import RequestError
from fastgen.link.messages import Add, Command
from fastgen.model.generation_defaults import BANNED, NUMBERS, generation_defaults
from fastgen.server.http.api_error import APIError
from fastgen.server.http.json_route import parse
from fastgen.server.openai import completions
from fastgen.server.openai.generation_request import ChatRequest, CompletionRequest
from fastgen.server.openai.pooling.request import NO_SAMPLING, PoolingRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.settings import ConfigError, EngineConfig
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # together over ten seconds

many = settings(max_examples=200, deadline=None)
ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Command)
VOCABULARY = 64
REJECTIONS = (APIError, ValidationError, RequestError, ConfigError)

numbers = (
    st.integers(-3, 70)
    | st.integers()
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 50.0, 5.5, 1e19, -1.0, -0.0, 5e-324, 1e308])
    | st.floats(-2, 101)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = numbers | st.booleans() | st.none() | st.text(max_size=3) | st.lists(numbers | st.booleans(), max_size=3)
# Python's parser of JSON files accepts more than JSON.
file_values = values | st.sampled_from([float("nan"), float("inf"), -float("inf")]) | st.lists(st.lists(values))
SAMPLING = [name for name in CompletionRequest.model_fields if name not in ("prompt", "model")]
POOLING = [name for name in PoolingRequest.model_fields if name != "model"]


def model_with(defaults: dict[str, Any]) -> ServedModel:
    model = SimpleNamespace(
        engine=SimpleNamespace(info=SimpleNamespace(max_model_length=VOCABULARY)),
        generation_defaults=defaults,
        grammars=GrammarChecker(cast(Tokenizer, None)),
        remaining_length=lambda tokens: VOCABULARY - tokens,
        tokenizer=None,
    )
    return cast(ServedModel, model)


def check(request: Request) -> None:
    """Check that the engine gets the request unchanged, if the server does not reject it for its values."""
    request.check(VOCABULARY, VOCABULARY)
    add = Add(request)
    assert DECODER.decode(ENCODER.encode(add)) == add


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    described = tmp_path_factory.mktemp("model")
    (described / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return described


@many
@given(file=st.dictionaries(st.sampled_from([*NUMBERS, *BANNED]), file_values, min_size=1, max_size=4))
@example(file={"top_k": 50.0, "max_new_tokens": 7.0, "temperature": 1, "suppress_tokens": [3]})
@example(file={"top_k": 2**63})
@example(file={"top_k": float("inf")})
@example(file={"max_new_tokens": float("inf")})
def test_defaults_that_are_accepted_at_load_reach_the_engine(folder: Path, file: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(file))
    with suppress(*REJECTIONS):
        model = model_with(generation_defaults("auto", folder))
        chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
        for body in (CompletionRequest.model_validate({"prompt": [1]}), chat):
            check(body.prompt_request([1, 2], model, model.generation_defaults.get("max_tokens")))


@many
@given(body=st.dictionaries(st.sampled_from(SAMPLING), values, max_size=3), prompt=values | st.just([1, 2]))
@example(body={"top_k": 2**63 - 1, "logit_bias": {"3": 1}, "seed": -5, "timeout": 1, "stop_token_ids": [1]}, prompt=[1])
@example(body={"allowed_token_ids": [1, 2], "logprobs": 1.0, "cache_salt": "a"}, prompt=[1])
async def test_completions_that_are_accepted_reach_the_engine(body: dict[str, Any], prompt: Any) -> None:
    with suppress(*REJECTIONS):
        completion = CompletionRequest.model_validate(parse(json.dumps({"prompt": prompt, **body}).encode()))
        completion.check()
        texts = [text for text in completion.prompt if isinstance(text, str)]
        grammar, _ = completion.structure() or (None, "")
        needs_tokenizer = texts or completion.bad_words or (grammar is not None and grammar.kind != "tokens")
        if not needs_tokenizer:
            for request in (await completions.rendered_completion(completion, model_with({}))).requests:
                check(request)


@many
@given(body=st.dictionaries(st.sampled_from(POOLING), values, max_size=3))
def test_pooling_requests_that_are_accepted_reach_the_engine(body: dict[str, Any]) -> None:
    with suppress(*REJECTIONS):
        request = PoolingRequest.model_validate(parse(json.dumps(body).encode()))
        check(request.engine_request(request.truncated([1, 2, 3], 2), NO_SAMPLING, Pooling(method="last")))


SETTINGS = ("token_budget", "inter_token_target", "prefix_caching", "swap_space", "max_sequences", "kv_cache_memory",
            "cuda_graphs", "dtype", "model")  # fmt: skip


@many
@given(given=st.dictionaries(st.sampled_from(SETTINGS), values, min_size=1, max_size=2))
@example(given={"max_sequences": 5.5})
@example(given={"max_sequences": True})
@example(given={"prefix_caching": "no"})
@example(given={"swap_space": 2**70})
@example(given={"model": "\udcff"})
def test_settings_that_are_accepted_reach_the_engine(given: dict[str, Any]) -> None:
    with suppress(*REJECTIONS):
        config = EngineConfig(**{"model": "a", **given})
        assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
