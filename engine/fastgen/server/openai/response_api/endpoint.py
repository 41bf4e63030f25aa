"""POST /v1/responses."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from fastgen.engine.request_output import OutputDelta
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.chat import admit_chat, chat_usage
from fastgen.server.openai.chat_choices import ChatChunkWriter, ChoiceOptions, chat_choice
from fastgen.server.openai.response_api.events import ResponseEvents
from fastgen.server.openai.response_api.objects import (
    Response,
    ResponseError,
    ResponseUsage,
    items_of,
    response,
    status_of,
)
from fastgen.server.openai.response_api.request import ALIASES, ResponseRequest
from fastgen.server.openai.responses import json_response
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> HTTPResponse:
    """Generate a response. It is not stored."""
    service: Service = request.app.state.service
    name = service.check_model(body.model)
    with client_names(ALIASES):
        chat = body.chat()
        handler, options = await admit_chat(service, chat, "resp")
    sampling = handler.outputs[0].request.sampling
    told = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    strict = {} if options.tools is None else {tool.name: tool.strict for tool in options.tools.offered}
    begun = response(body, handler.id.replace("resp-", "resp_", 1), handler.created, name, told, strict)
    if body.stream:
        return TokenStream(handler, _StreamEvents(handler, options, begun))
    return await while_connected(request, _complete(handler, options, begun))


async def _complete(handler: RequestHandler, options: ChoiceOptions, begun: Response) -> HTTPResponse:
    with handler:
        (output,) = await handler.finish()
    choice = chat_choice(0, output, options)
    finished = _finished(begun, handler, options, choice.finish_reason)
    return json_response(msgspec.structs.replace(finished, output=items_of(choice)))


class _StreamEvents:
    """Encodes the events of a stream. Its last event says that it has ended, so no marker follows."""

    def __init__(self, handler: RequestHandler, options: ChoiceOptions, begun: Response) -> None:
        self._handler = handler
        self._options = options
        self._begun = begun
        self._events = ResponseEvents(begun)
        self._writer = ChatChunkWriter(0, options)
        self._reason: str | None = None

    def begin(self) -> bytes:
        return b"".join(self._events.begin())

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        written: list[bytes] = []
        for chunk in self._writer.write(delta, self._handler.outputs[index]):
            self._reason = chunk.finish_reason
            written += self._events.write(chunk.delta)
        return b"".join(written)

    def end(self) -> bytes:
        finished = _finished(self._begun, self._handler, self._options, self._reason)
        return b"".join(self._events.end(finished, "completed" if finished.status == "completed" else "incomplete"))

    def fail(self, error: APIError) -> bytes:
        failed = msgspec.structs.replace(self._begun, status="failed", error=ResponseError(error.message))
        return b"".join(self._events.end(failed, "incomplete"))


def _finished(begun: Response, handler: RequestHandler, options: ChoiceOptions, reason: str | None) -> Response:
    status, details = status_of(reason)
    return msgspec.structs.replace(
        begun,
        status=status,
        incomplete_details=details,
        usage=ResponseUsage.of(chat_usage(handler, options)),
        completed_at=int(time.time()) if status == "completed" else None,
    )
