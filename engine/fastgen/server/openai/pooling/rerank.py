"""/v1/rerank and /v1/score, in the formats of Jina, Cohere and vLLM: how well documents answer queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field

from fastgen.core.request import Pooling, Request
from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.fields.types import Boolean, Documents, Integer, String, field_error
from fastgen.server.openai.fields.unsupported import refused
from fastgen.server.openai.pooling.request import NO_SAMPLING, EmbeddingUsage, PoolingRequest
from fastgen.server.openai.response_bodies import ResponseHead, json_response
from fastgen.server.serving.encoding import encode, encode_rendered
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.vectors import probability_of_yes, similarity, vector
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.reranker import ENDING, beginning

router = APIRouter(route_class=JSONRoute)

_ONE_SCORE = "scores are probabilities or cosines"


class Score(msgspec.Struct, frozen=True):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class Scores(ResponseHead, frozen=True):
    """Response of /v1/score."""

    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class Document(msgspec.Struct, frozen=True):
    """A document of the request."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """Response of /v1/rerank, best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class _PairsRequest(PoolingRequest):
    """Fields of /v1/score and /v1/rerank; `params` names the fields with the texts of each pair."""

    params: ClassVar[tuple[str, str]]

    instruction: String | None = Field(None, description="the task, for rerankers (`--task score`) only")
    use_activation: Any = refused(_ONE_SCORE, True)
    activation: Any = refused(_ONE_SCORE, True)

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the texts of both fields."""
        first, second = (getattr(self, param) for param in self.params)
        return [first] if isinstance(first, str) else first, second

    def pairs(self) -> list[tuple[int, int]]:
        """Return the indices of each pair. A single first text is paired with each second one.

        Raises:
            RequestError: if there are several first texts, but not one for each second text.
        """
        first, second = map(len, self.texts())
        if first not in (1, second):
            one, other = self.params
            raise field_error(one, f"has {first} texts, and {other} has {second}; give one text, or as many as {other}")
        return [(0 if first == 1 else index, index) for index in range(second)]


class ScoreRequest(_PairsRequest):
    """Body of /v1/score."""

    params = ("text_1", "text_2")

    text_1: Documents = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="or `queries`, or `data_1`"
    )
    text_2: Documents = Field(
        validation_alias=AliasChoices("text_2", "documents", "data_2"), description="or `documents`, or `data_2`"
    )


class RerankRequest(_PairsRequest):
    """Body of /v1/rerank."""

    params = ("query", "documents")

    query: String
    documents: Documents
    top_n: Annotated[Integer, Field(ge=0)] | None = Field(None, description="0 returns all")
    return_documents: Boolean | None = Field(None, description="`false` leaves the documents out of the response")
    max_tokens_per_doc: Any = refused("use truncate_prompt_tokens")
    max_chunks_per_doc: Any = refused("documents are not split; use truncate_prompt_tokens")
    rank_fields: Any = refused("documents are strings, or objects with a text", ["text"])


@router.post("/score", include_in_schema=False)
@router.post("/v1/score")
async def create_scores(body: ScoreRequest, request: HTTPRequest) -> Response:
    """Score each pair of texts."""

    def response(handler: RequestHandler, name: str, usage: EmbeddingUsage, scores: list[float]) -> Scores:
        data = [Score(index, score) for index, score in enumerate(scores)]
        return Scores(handler.id, handler.created, name, data, usage)

    return await _respond(body, request, "score", response)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank")
async def create_ranking(body: RerankRequest, request: HTTPRequest) -> Response:
    """Sort documents by how well they answer a query."""

    def response(handler: RequestHandler, name: str, usage: EmbeddingUsage, scores: list[float]) -> Ranking:
        documents = [UNSET if body.return_documents is False else Document(text) for text in body.documents]
        results = map(RankedDocument, range(len(scores)), scores, documents)
        best = sorted(results, key=lambda result: -result.relevance_score)[: body.top_n or None]
        return Ranking(handler.id, name, best, usage)

    return await _respond(body, request, "rerank", response)


async def _respond(
    body: _PairsRequest, request: HTTPRequest, id_prefix: str, response: Callable[..., msgspec.Struct]
) -> Response:
    """Score pairs: with a reranker by its answer to each, otherwise by the similarity of their vectors."""
    service: Service = request.app.state.service
    model, name = service.model_for("score", "embed"), service.check_model(body.model)
    body.check()
    (first, second), pairs, is_reranker = body.texts(), body.pairs(), model.task.name == "score"
    if body.instruction is not None and not is_reranker:
        raise field_error("instruction", "this server scores by similarity; put it into the text")
    with client_names({"prompt": body.params[1], "deadline_seconds": "timeout"}):
        ids = service.reserve(model, len(pairs) if is_reranker else len(first) + len(second), 1)
        if is_reranker:
            requests = await _questions(body, model, pairs)
        else:
            requests = await body.embedding_requests(first, model, body.params[0])
            requests += await body.embedding_requests(second, model, body.params[1])
        handler = service.handler(id_prefix, model, ids, RenderedRequest(requests=requests))

    async def complete() -> Response:
        with handler:
            pooled = await handler.pooled()
        if is_reranker:
            scores = [probability_of_yes(result) for result in pooled]
        else:
            vectors = [vector(result, None, normalised=True) for result in pooled]
            scores = [similarity(vectors[i], vectors[len(first) + j]) for i, j in pairs]
        return json_response(response(handler, name, EmbeddingUsage.of(handler.usage()), scores))

    return await while_connected(request, complete())


async def _questions(body: _PairsRequest, model: ServedModel, pairs: list[tuple[int, int]]) -> list[Request]:
    """Return the engine's requests that ask a reranker about each pair, without ids.

    Raises:
        RequestError: if a text is too long or would become a control token, a value is out of range, or
            `truncation_side` is left.
    """
    if body.truncation_side == "left":
        raise field_error("truncation_side", "the question comes first; use right")
    first, second = body.texts()
    for texts, param in zip((first, second), body.params, strict=True):
        for text in texts:
            model.prompt_size_limit.check(text, param)
    longest, param, instruction = model.engine.info.max_model_length, body.params[1], body.instruction
    if model.control is not None:
        first, second, instruction = model.control.guarded((first, second, instruction))
    prompts = [beginning(first[i], second[j], instruction) for i, j in pairs]
    if model.guarded is None:
        ending, *beginnings = await encode(model.tokenizer, [ENDING, *prompts], add_special_tokens=False)
    else:
        ending, *beginnings = [
            await encode_rendered(model.tokenizer, model.guarded, text, param, add_special_tokens=False)
            for text in (ENDING, *prompts)
        ]
    pooling = Pooling(method="logprobs", token_ids=model.task.answers)
    questions = (body.truncated(start + ending, longest, len(ending)) for start in beginnings)
    return [body.engine_request(question, NO_SAMPLING, pooling) for question in questions]
