"""POST /v1/responses."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.chat import admit_chat, chat_usage
from fastgen.server.openai.chat_choices import ChoiceOptions, chat_choice
from fastgen.server.openai.response_api.events import ResponseEvents
from fastgen.server.openai.response_api.objects import Response, finished, items_of, response
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
    strict = {} if options.tools is None else {tool.name: tool.strict for tool in options.tools.offered}
    response_id, sampling = handler.id.replace("resp-", "resp_", 1), handler.outputs[0].request.sampling
    begun = response(body, response_id, handler.created, name, sampling, strict)
    if body.stream:
        return TokenStream(handler, ResponseEvents(handler, options, begun))
    return await while_connected(request, _complete(handler, options, begun))


async def _complete(handler: RequestHandler, options: ChoiceOptions, begun: Response) -> HTTPResponse:
    with handler:
        (output,) = await handler.finish()
    choice = chat_choice(0, output, options)
    complete = finished(begun, chat_usage(handler, options), choice.finish_reason)
    return json_response(msgspec.structs.replace(complete, output=items_of(choice)))
