"""Routes of other servers that this server lacks. Their 404 names the route and what to use instead."""

from __future__ import annotations

import re

from fastgen.server.http.api_error import APIError

_GENERATE = "/v1/chat/completions and /v1/completions generate text"
_NOT_STORED = "completions are not stored; keep the answer of POST /v1/chat/completions"
_TEXT_ONLY = "only text models are supported"
_OTHER_ROUTES: tuple[tuple[str, str], ...] = (
    (r"/v1/chat/completions(/.+)?", _NOT_STORED),
    (r"/v1/responses(/.*)?", "responses are not stored; keep the answer of POST /v1/responses"),
    (r"(/v1)?/classify|/pooling", "/v1/embeddings returns vectors, and /v1/score and /v1/rerank score pairs of texts"),
    (
        r"/v1/messages(/count_tokens)?",
        "Anthropic's API is not supported; use /v1/chat/completions, and /tokenize to count",
    ),
    (r"/v1/(conversations|assistants|threads|vector_stores)(/.*)?", f"nothing is stored; {_GENERATE}"),
    (r"/v1/(files|uploads|batches)(/.*)?", "there are no batch jobs; send the requests, which are queued"),
    (r"/v1/(fine_tuning|evals)(/.*)?", "models are served, not trained or evaluated"),
    (r"/v1/audio/.*|/v1/realtime(/.*)?", _TEXT_ONLY),
    (r"/v1/(images|videos)(/.*)?", _TEXT_ONLY),
    (r"/v1/moderations", "moderation is not supported"),
    (r"/v1/(un)?load_lora_adapter", "adapters are not supported"),
    (r"/generate|/invocations|/inference/.*", _GENERATE),
    (r"/server_info|/get_server_info|/get_model_info", "/v1/models and /metrics describe the model and the server"),
    (r"/health_generate|/ping", "/ready is 200 while requests are accepted, and /health unless the engine is dead"),
)
_PATTERNS = tuple((re.compile(pattern), instead) for pattern, instead in _OTHER_ROUTES)


def missing_route(method: str, path: str) -> APIError:
    """Return the 404 for a request to a route that does not exist."""
    instead = next((instead for pattern, instead in _PATTERNS if pattern.fullmatch(path)), None)
    hint = "/openapi.json lists the routes" if instead is None else instead
    return APIError(404, f"{method} {path[:100]}: this server has no such route; {hint}", code="not_found")
