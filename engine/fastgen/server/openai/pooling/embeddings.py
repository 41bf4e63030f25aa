"""/v1/embeddings: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from fastgen.core.request_error import RequestError
from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.fields.types import Boolean, EncodingFormat, Integer, Prompts
from fastgen.server.openai.fields.unsupported import refused
from fastgen.server.openai.pooling.request import EmbeddingUsage, PoolingRequest
from fastgen.server.openai.response_bodies import ResponseHead, json_response
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.served_task import ServedTask
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.vectors import vector
from fastgen.text.rendered_request import RenderedRequest

router = APIRouter(route_class=JSONRoute)

_ALIASES = {"prompt": "input", "deadline_seconds": "timeout"}
# The event loop runs other tasks after this many numbers, whose encoding takes a few milliseconds.
_NUMBERS_AT_ONCE = 1 << 16


class EmbeddingRequest(PoolingRequest):
    """Body of /v1/embeddings."""

    input: Prompts
    dimensions: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="how many leading dimensions to keep; the vector is scaled to length 1 again"
    )
    encoding_format: EncodingFormat = Field(None, description="base64 encodes little-endian float32 numbers")
    add_special_tokens: Boolean | None = None
    normalize: Boolean | None = Field(
        None, description="whether to scale vectors to length 1; the model's files give the default"
    )
    use_activation: Boolean | None = Field(None, description="the same as `normalize`")
    embed_dtype: Any = refused("numbers are float32", "float32")
    endianness: Any = refused("base64 is little-endian", "native", "little")
    messages: Any = refused("use input")

    def num_dimensions(self, hidden_size: int, task: ServedTask) -> int:
        """Return how many dimensions each vector has; raise RequestError if the model does not support them."""
        wanted, trained = self.dimensions or hidden_size, task.pooling.dimensions
        if wanted > hidden_size:
            raise RequestError(
                f"dimensions is {wanted}: vectors of this model have {hidden_size}; ask for fewer", "dimensions"
            )
        if trained and wanted not in trained and wanted != hidden_size:
            raise RequestError(
                f"dimensions is {wanted}: this model was trained for {', '.join(map(str, trained))}; use one of them",
                "dimensions",
            )
        return wanted

    def is_normalised(self, task: ServedTask) -> bool:
        """Return whether vectors are scaled to length 1."""
        asked = self.normalize if self.use_activation is None else self.use_activation
        return task.pooling.normalised if asked is None else asked


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one text, as numbers or as base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(ResponseHead, frozen=True):
    """Response of /v1/embeddings."""

    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed each text."""
    service: Service = request.app.state.service
    model, name = service.model_for("embed"), service.check_model(body.model)
    body.check()
    dimensions = body.num_dimensions(model.engine.info.hidden_size, model.task)
    with client_names(_ALIASES):
        ids = service.reserve(model, len(body.input), 1)
        add_special_tokens = body.add_special_tokens is not False
        requests = await body.embedding_requests(body.input, model, "input", add_special_tokens=add_special_tokens)
        handler = service.handler("embd", model, ids, RenderedRequest(requests=requests))
    return await while_connected(request, _complete(handler, name, body, dimensions, model.task))


async def _complete(
    handler: RequestHandler, name: str, body: EmbeddingRequest, dimensions: int, task: ServedTask
) -> Response:
    with handler:
        pooled = await handler.pooled()
    encoded: list[Any] = []
    for index, result in enumerate(pooled):
        values = vector(result, dimensions, normalised=body.is_normalised(task))
        is_base64 = body.encoding_format == "base64"
        written = base64.b64encode(values.astype("<f4").tobytes()).decode() if is_base64 else values.tolist()
        encoded.append(msgspec.Raw(msgspec.json.encode(Embedding(index, written))))
        if (index + 1) % max(1, _NUMBERS_AT_ONCE // dimensions) == 0:
            await asyncio.sleep(0)
    usage = EmbeddingUsage.of(handler.usage())
    return json_response(Embeddings(handler.id, handler.created, name, encoded, usage))
