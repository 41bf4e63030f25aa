"""The OpenAPI document: FastAPI's, which knows the bodies, with the responses, which msgspec encodes unseen by it."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fastgen.server.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from fastgen.server.openai.tokenization import Text, Tokens
from fastgen.server.probes import Status, Version

_REF = "#/components/schemas/{name}"
_ANSWERS: dict[str, type] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/tokenize": Tokens,
    "/detokenize": Text,
    "/health": Status,
    "/ready": Status,
    "/version": Version,
}
_STREAMED = frozenset({"/v1/completions", "/v1/chat/completions"})
_REFUSALS = {
    "400": "A value is wrong; the error names its field.",
    "401": "There is no valid API key.",
    "404": "The model is not served here.",
    "408": "The request did not come whole in time, or its own timeout passed before the first token.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to try again.",
    "431": "The head is too large.",
    "500": "The engine ended while it worked on the request.",
    "503": "Loading, draining or without an engine; Retry-After says when to try again.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """What `app` serves, as OpenAPI 3.1."""
    whole = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    answers, definitions = msgspec.json.schema_components(set(_ANSWERS.values()), ref_template=_REF)
    by_type = dict(zip(set(_ANSWERS.values()), answers, strict=True))
    components = whole.setdefault("components", {})
    schemas = {
        name: schema
        for name, schema in components.get("schemas", {}).items()
        if name not in ("HTTPValidationError", "ValidationError")  # what FastAPI would say: our errors are OpenAI's
    }
    components["schemas"] = {**schemas, **definitions, "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, by_type)
            operation["security"] = [{"key": []}, {}]
    return whole


def _responses(path: str, by_type: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    elif path in _ANSWERS:
        content = {"application/json": {"schema": by_type[_ANSWERS[path]]}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    if path in ("/health", "/ready"):
        said = {"description": "What is wrong.", "content": content}
        return {"200": {"description": "All is well.", "content": content}, "503": said}
    answers = {status: {"description": text, "content": refusal} for status, text in _REFUSALS.items()}
    return {"200": {"description": "The answer.", "content": content}, **answers}
