"""Requests generated from the OpenAPI document are answered as documented, never with a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from engine.server.serving import Serving
from support.waiting import HANG_SECONDS

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/score", "POST"),
    ("/v1/rerank", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
    ("/version", "GET"),
    ("/load", "GET"),
]


POOLED = ("/v1/embeddings", "/v1/score", "/v1/rerank")


def document_of(server: Serving) -> Any:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


@pytest.fixture(scope="module")
def described(scripted: Serving) -> Any:
    return document_of(scripted)


@pytest.fixture(scope="module")
def described_embedder(embedder: Serving) -> Any:
    return document_of(embedder)


def test_every_operation_of_the_document_is_tested(described: Any) -> None:
    assert {(path, method.upper()) for path in described for method in described[path]} == set(OPERATIONS)


# pytest 9 is too new for schemathesis' own plug-in, which would parametrize by the document.
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_generated_requests_are_answered_as_documented(
    described: Any, described_embedder: Any, path: str, method: str, mode: GenerationMode
) -> None:
    document = described_embedder if path in POOLED else described
    session = requests.Session()
    max_examples = 5 if method == "GET" else 25

    @settings(max_examples=max_examples, deadline=None, derandomize=True, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        case.call_and_validate(session=session, checks=CHECKS, timeout=HANG_SECONDS)

    try:
        answered()
    except Unsatisfiable:
        assert (method, mode) == ("GET", GenerationMode.NEGATIVE)  # no invalid input exists


def test_every_error_is_documented_in_openais_format(scripted: Serving) -> None:
    document = scripted.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = document["paths"][path]["post"]["responses"]
        for status in ("400", "401", "404", "408", "413", "429", "431", "500", "503"):
            content = responses[status]["content"]
            assert content == {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "422" not in responses


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models"])
def test_load_balancers_may_probe_with_head(scripted: Serving, path: str) -> None:
    probed, got = scripted.request("HEAD", path), scripted.request("GET", path)
    assert (probed.status_code, probed.content) == (200, b"")
    assert probed.headers["Content-Length"] == str(len(got.content))


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("PUT", "/metrics", "GET"), ("GET", "/v1/completions", "POST")]
)
def test_a_method_that_a_route_lacks_is_refused_with_those_it_has(
    scripted: Serving, method: str, path: str, allowed: str
) -> None:
    refused = scripted.request(method, path)
    assert (refused.status_code, refused.headers["Allow"]) == (405, allowed)
