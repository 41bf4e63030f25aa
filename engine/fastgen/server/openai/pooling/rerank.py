"""/v1/rerank and /v1/score: how well documents answer queries.

The formats are those of Jina, Cohere and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field

from fastgen.core.request import Pooling, Request, RequestError
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.fields.types import Boolean, Documents, Integer, String
from fastgen.server.openai.fields.unsupported import refused
from fastgen.server.openai.pooling.embeddings import EmbeddingUsage
from fastgen.server.openai.pooling.request import PoolingRequest
from fastgen.server.openai.responses import json_response
from fastgen.server.serving.encoding import encode
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.request_handler import OutputOptions, RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.vectors import probability_of_yes, similarity, vector
from fastgen.text.reranker import ENDING, beginning

router = APIRouter(route_class=JSONRoute)

_ONE_SCORE = "scores are probabilities or cosines"


class _PairsRequest(PoolingRequest):
    instruction: String | None = Field(None, description="the task, for rerankers (`--task score`) only")
    use_activation: Any = refused(_ONE_SCORE, True)
    activation: Any = refused(_ONE_SCORE, True)


class ScoreRequest(_PairsRequest):
    """Body of /v1/score."""

    text_1: Documents = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="or `queries`, or `data_1`"
    )
    text_2: Documents = Field(
        validation_alias=AliasChoices("text_2", "documents", "data_2"), description="or `documents`, or `data_2`"
    )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Indices of each pair: one text_1 with each text_2, or both lists in step.

        Raises:
            RequestError: if the lists have other lengths.
        """
        first, second = len(self.text_1), len(self.text_2)
        if first not in (1, second):
            raise RequestError(f"text_1: {first} texts for {second} of text_2; give one, or as many", "text_1")
        return [(0 if first == 1 else index, index) for index in range(second)]


class RerankRequest(_PairsRequest):
    """Body of /v1/rerank."""

    query: String
    documents: Documents
    top_n: Annotated[Integer, Field(ge=0)] | None = Field(None, description="0 returns all")
    return_documents: Boolean | None = Field(None, description="`false` leaves the documents out of the answer")
    max_tokens_per_doc: Any = refused("use truncate_prompt_tokens")
    max_chunks_per_doc: Any = refused("documents are not split; use truncate_prompt_tokens")
    rank_fields: Any = refused("documents are strings, or objects with a text", ["text"])


class Score(msgspec.Struct, frozen=True):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct, frozen=True):
    """Response of /v1/score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class Document(msgspec.Struct, frozen=True):
    """A document of the request."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """Response of /v1/rerank, best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


@router.post("/score", include_in_schema=False)
@router.post("/v1/score")
async def create_scores(body: ScoreRequest, request: HTTPRequest) -> Response:
    """Score each pair of texts."""
    service: Service = request.app.state.service
    model, name = service.model_for("score", "embed"), service.check_model(body.model)
    body.check()
    scorer = _Scorer(body, model, body.text_1, body.text_2, body.pairs, ("text_1", "text_2"))
    return await while_connected(request, _score(await scorer.handler(service, "score"), scorer, name))


async def _score(handler: RequestHandler, scorer: _Scorer, name: str) -> Response:
    with handler:
        scores = scorer.scores(await handler.pooled())
    data = [Score(index, score) for index, score in enumerate(scores)]
    return json_response(Scores(handler.id, handler.created, name, data, EmbeddingUsage.of(handler.usage())))


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank")
async def create_ranking(body: RerankRequest, request: HTTPRequest) -> Response:
    """Sort documents by how well they answer a query."""
    service: Service = request.app.state.service
    model, name = service.model_for("score", "embed"), service.check_model(body.model)
    body.check()
    pairs = [(0, index) for index in range(len(body.documents))]
    scorer = _Scorer(body, model, [body.query], body.documents, pairs, ("query", "documents"))
    return await while_connected(request, _rank(await scorer.handler(service, "rerank"), scorer, body, name))


async def _rank(handler: RequestHandler, scorer: _Scorer, body: RerankRequest, name: str) -> Response:
    with handler:
        scores = scorer.scores(await handler.pooled())
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        RankedDocument(index, scores[index], Document(body.documents[index]) if shows else UNSET) for index in best
    ]
    return json_response(Ranking(handler.id, name, results, EmbeddingUsage.of(handler.usage())))


class _Scorer:
    """Scores pairs: with a reranker by its answer to each, otherwise by the similarity of their vectors.

    Args:
        body: the request.
        model: the served model.
        first, second: the texts.
        pairs: indices of each pair's texts.
        params: names of the fields with the texts.
    """

    def __init__(
        self,
        body: _PairsRequest,
        model: ServedModel,
        first: Sequence[str],
        second: Sequence[str],
        pairs: Sequence[tuple[int, int]],
        params: tuple[str, str],
    ) -> None:
        self._body = body
        self._model = model
        self._first, self._second = first, second
        self._pairs = pairs
        self._params = params
        self._answers = model.task.name == "score"
        if body.instruction is not None and not self._answers:
            raise RequestError("instruction: this server scores by similarity; put it into the text", "instruction")

    async def handler(self, service: Service, id_prefix: str) -> RequestHandler:
        """Admit the requests of all pairs and return their handler.

        Raises:
            RequestError: if the model cannot serve one of them.
            APIError: if the queue is full.
        """
        with client_names({"prompt": self._params[1], "deadline_seconds": "timeout"}):
            count = len(self._pairs) if self._answers else len(self._first) + len(self._second)
            places = service.reserve(self._model, count, 1)
            requests = await (self._questions() if self._answers else self._texts())
            return service.handler(id_prefix, places, requests, OutputOptions())

    def scores(self, pooled: Sequence[bytes]) -> list[float]:
        """Return the score of each pair, for the results of the handler's requests."""
        if self._answers:
            return [probability_of_yes(result) for result in pooled]
        vectors = [vector(result, None, normalised=True) for result in pooled]
        return [similarity(vectors[first], vectors[len(self._first) + second]) for first, second in self._pairs]

    async def _texts(self) -> list[Request]:
        first = await self._body.embedding_requests(self._first, self._model, self._params[0])
        return first + await self._body.embedding_requests(self._second, self._model, self._params[1])

    async def _questions(self) -> list[Request]:
        body, model = self._body, self._model
        if body.truncation_side == "left":
            raise RequestError("truncation_side: the question comes first; use right", "truncation_side")
        for texts, param in zip((self._first, self._second), self._params, strict=True):
            for text in texts:
                model.prompt_size_limit.check(text, param)
        prompts = [beginning(self._first[i], self._second[j], body.instruction) for i, j in self._pairs]
        ending, *beginnings = await encode(model.tokenizer, [ENDING, *prompts], add_special_tokens=False)
        pooling = Pooling(method="logprobs", token_ids=model.task.answers)
        longest = model.engine.info.max_model_length
        questions = [body.truncated(begun + ending, longest, len(ending)) for begun in beginnings]
        return [body.pooling_request(question, pooling) for question in questions]
