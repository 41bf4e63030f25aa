"""The OpenAPI document: request bodies from FastAPI, response schemas from msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fastgen.server.openai.pooling.embeddings import Embeddings
from fastgen.server.openai.pooling.rerank import Ranking, Scores
from fastgen.server.openai.response_bodies import ChatCompletion, Completion, ModelCard, ModelList
from fastgen.server.openai.responses.objects import ResponseBody
from fastgen.server.openai.tokenization import DetokenizeResponse, TokenizeResponse
from fastgen.server.probes import Load, Readiness, Status, Version

_REF = "#/components/schemas/{name}"
_RESPONSES: dict[str, type] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": ResponseBody,
    "/v1/embeddings": Embeddings,
    "/v1/score": Scores,
    "/v1/rerank": Ranking,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/health": Status,
    "/ready": Readiness,
    "/version": Version,
    "/load": Load,
}
_STREAMED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_ERRORS = {
    "400": "The body is not valid JSON, or a field has an invalid value, which `param` names.",
    "401": "The API key is missing or invalid.",
    "403": "The Host header has a name that is not allowed.",
    "404": "The model is not served here, or the server has another task.",
    "408": "The request was not received in time, or its `timeout` passed before the first token or the result.",
    "409": "A receipt is requested, and the model's files have changed since the server started.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "The queue is full; retry after Retry-After seconds.",
    "431": "The request line and headers are too large, or there are too many headers.",
    "500": "The engine died during the request, or the server failed; its log has the details.",
    "503": "The server is loading, draining or out of memory, or its engine hangs or is dead; retry after "
    "Retry-After seconds, if the response has that header.",
}


class ErrorDetails(msgspec.Struct):
    """What happened and what to do; `param` is the invalid field, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """An error in OpenAI's format."""

    error: ErrorDetails


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `app`."""
    openapi = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    (*bodies, error), definitions = msgspec.json.schema_components((*_RESPONSES.values(), Error), ref_template=_REF)
    by_path = dict(zip(_RESPONSES, bodies, strict=True))
    schemas = openapi["components"]["schemas"]
    del schemas["HTTPValidationError"], schemas["ValidationError"]  # FastAPI's error format; ours is OpenAI's
    schemas |= definitions
    openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in openapi["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, by_path.get(path), error)
            operation["security"] = [{"key": []}, {}]
    return openapi


def _responses(path: str, body: dict[str, Any] | None, error: dict[str, Any]) -> dict[str, Any]:
    """Return the responses of a path; `body` and `error` are the schemas of its JSON responses."""
    content: dict[str, Any] = {}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif body is not None:
        content = {"application/json": {"schema": body}}
    if path in _STREAMED:
        content["text/event-stream"] = {}  # a schema would describe each event, not the text
    if path in ("/health", "/ready"):
        unavailable = {"description": "The reason.", "content": content}
        return {"200": {"description": "Healthy or ready.", "content": content}, "503": unavailable}
    rejected = {"application/json": {"schema": error}}
    errors = {status: {"description": text, "content": rejected} for status, text in _ERRORS.items()}
    return {"200": {"description": "Success.", "content": content}, **errors}
