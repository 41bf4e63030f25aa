"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import EventStream, while_connected
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

router = APIRouter(route_class=JSONRoute)


class _ResponseStream(EventStream):
    """A stream of a response's events. Its last event says that it has ended, so no marker follows."""

    done = b""


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
    begun = response(body, handler.id.replace("resp-", "resp_", 1), handler.created, name, told)
    if body.stream:
        return _ResponseStream(_stream(handler, options, begun))
    return await while_connected(request, _complete(handler, options, begun))


async def _complete(handler: RequestHandler, options: ChoiceOptions, begun: Response) -> HTTPResponse:
    with handler:
        (output,) = await handler.finish()
    choice = chat_choice(0, output, options)
    finished = _finished(begun, handler, options, choice.finish_reason)
    return json_response(msgspec.structs.replace(finished, output=items_of(choice)))


async def _stream(handler: RequestHandler, options: ChoiceOptions, begun: Response) -> AsyncGenerator[bytes]:
    events, writer, reason = ResponseEvents(begun), ChatChunkWriter(0, options), None
    with handler:
        for event in events.begin():
            yield event
        try:
            async with aclosing(handler.stream()) as deltas:
                async for _, delta in deltas:
                    for chunk in writer.write(delta, handler.outputs[0]):
                        reason = chunk.finish_reason
                        for event in events.write(chunk.delta):
                            yield event
        except APIError as error:  # the status has been sent
            failed = msgspec.structs.replace(begun, status="failed", error=ResponseError(error.message))
            for event in events.end(failed, "incomplete"):
                yield event
            return
    finished = _finished(begun, handler, options, reason)
    for event in events.end(finished, "completed" if finished.status == "completed" else "incomplete"):
        yield event


def _finished(begun: Response, handler: RequestHandler, options: ChoiceOptions, reason: str | None) -> Response:
    status, details = status_of(reason)
    return msgspec.structs.replace(
        begun,
        status=status,
        incomplete_details=details,
        usage=ResponseUsage.of(chat_usage(handler, options)),
        completed_at=int(time.time()) if status == "completed" else None,
    )
