"""No request field that changes an answer is silently ignored: each is honoured, or refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from pydantic import BaseModel, ValidationError

from fastgen.server.openai.field_table import COHERE, OPENAI, SGLANG, VLLM, fields_page
from fastgen.server.openai.fields.unsupported import Ignored, Refused
from fastgen.server.openai.generation_request import ChatRequest, CompletionRequest
from fastgen.server.openai.pooling.embeddings import EmbeddingRequest
from fastgen.server.openai.pooling.rerank import RerankRequest, ScoreRequest
from fastgen.server.openai.responses.request import ResponseRequest

REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponseRequest: {"input": "a"},
    EmbeddingRequest: {"input": "a"},
    ScoreRequest: {"text_1": "a", "text_2": "b"},
    RerankRequest: {"query": "a", "documents": ["b"]},
}
STRANGE = "a value that no field has"


def marked(kind: type) -> list[Any]:
    return [
        pytest.param(request, name, marker, id=f"{request.__name__}-{name}")
        for request in REQUIRED
        for name, field in request.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, kind)
    ]


def fields_of(params: Any) -> set[str]:
    streams = set() if params is embedding_params.EmbeddingCreateParams else {"stream"}
    return set(typing.get_type_hints(params)) | streams


@pytest.mark.parametrize(
    ("request_type", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_params.CompletionCreateParamsBase),
        (ResponseRequest, response_params.ResponseCreateParamsBase),
        (EmbeddingRequest, embedding_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_official_client_is_known(request_type: type[BaseModel], params: Any) -> None:
    assert fields_of(params) - set(request_type.model_fields) == set()
    assert fields_of(params) - OPENAI == set()


@pytest.mark.parametrize("names", [VLLM, SGLANG, COHERE], ids=["vllm", "sglang", "cohere"])
def test_every_field_of_other_servers_is_known(names: frozenset[str]) -> None:
    assert names - {name for request in REQUIRED for name in request.model_fields} == set()


def test_a_field_that_chat_completions_honour_is_not_lost_in_responses() -> None:
    unsupported = {parameter.values[1] for kind in (Refused, Ignored) for parameter in marked(kind)}
    assert set(ChatRequest.model_fields) - set(ResponseRequest.model_fields) - unsupported == set()


@pytest.mark.parametrize(("request_type", "name", "marker"), marked(Refused))
def test_an_unsupported_field_is_rejected_by_name(request_type: type[BaseModel], name: str, marker: Refused) -> None:
    with pytest.raises(ValidationError) as raised:
        request_type.model_validate({**REQUIRED[request_type], name: STRANGE})
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]
    for neutral in (None, *marker.neutral):
        request_type.model_validate({**REQUIRED[request_type], name: neutral})


@pytest.mark.parametrize(("request_type", "name", "marker"), marked(Ignored))
def test_a_field_without_effect_is_accepted(request_type: type[BaseModel], name: str, marker: Ignored) -> None:
    assert marker.why
    request_type.model_validate({**REQUIRED[request_type], name: STRANGE})


def test_the_table_has_a_row_for_every_known_field() -> None:
    rows = {line.split("`")[1]: line for line in fields_page().splitlines() if line.startswith("| `")}
    assert set(rows) == {name for request in REQUIRED for name in request.model_fields}
    assert rows["temperature"].startswith("| `temperature` | OpenAI | yes | yes | yes | – | – | – |")
    assert rows["audio"].startswith("| `audio` | OpenAI | – | refused | – | – | – | – | only text")
    assert rows["lora_path"].startswith("| `lora_path` | SGLang | refused | refused | – | – | – | – |")
    assert rows["service_tier"].startswith('| `service_tier` | OpenAI | – | only `"auto"`, `"default"` |')
    assert rows["user"].startswith(f"| `user` | OpenAI |{' no effect |' * 6}")


@pytest.mark.parametrize("name", ["reasoning_effort", "service_tier", "verbosity"])
def test_a_value_that_the_field_never_has_is_reported_with_the_choices(name: str) -> None:
    with pytest.raises(ValidationError, match=r'must be one of ".*"medium"|must be one of "auto"'):
        ChatRequest.model_validate({**REQUIRED[ChatRequest], name: "bogus"})


def test_too_many_biases_are_rejected_with_the_body() -> None:
    biases = {str(token): 1 for token in range(1025)}
    with pytest.raises(ValidationError, match="has 1025 tokens; at most 1024"):
        CompletionRequest.model_validate({"prompt": "a", "logit_bias": biases})
    biases.pop("0")
    CompletionRequest.model_validate({"prompt": "a", "logit_bias": biases})
