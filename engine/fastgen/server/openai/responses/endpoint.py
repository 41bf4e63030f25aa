"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from fastgen.server.http.api_error import APIError
from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.chat.endpoint import admit_chat, chat_receipts, chat_usage
from fastgen.server.openai.receipts import ReceiptWriter
from fastgen.server.openai.response_bodies import json_response
from fastgen.server.openai.responses.objects import ItemStatus, ResponseBody, ResponseError, begun_response, finished
from fastgen.server.openai.responses.output import ItemEvent, Output
from fastgen.server.openai.responses.request import ALIASES, ResponseRequest
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.request_output import OutputDelta, RequestOutput

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Generate a response. It is not stored."""
    service: Service = request.app.state.service
    name = service.check_model(body.model)
    with client_names(ALIASES):
        chat = await off_loop(body.chat)
        receipts = await chat_receipts(service, chat, name)
        handler = await admit_chat(service, chat, "resp")
    begun = begun_response(body, handler, name)
    if body.stream:
        return TokenStream(handler, _ResponseEvents(handler, begun, receipts))
    return await while_connected(request, _complete(handler, begun, receipts))


async def _complete(handler: RequestHandler, begun: ResponseBody, receipts: ReceiptWriter | None) -> Response:
    with handler:
        (output,) = await handler.finish()
    return await off_loop(_response, handler, begun, receipts, output)


def _response(
    handler: RequestHandler, begun: ResponseBody, receipts: ReceiptWriter | None, output: RequestOutput
) -> Response:
    written = Output(handler.rendered)
    written.add(output.as_delta())
    complete = _finished(handler, begun, receipts, written)
    written.close("completed" if complete.status == "completed" else "incomplete")
    return json_response(msgspec.structs.replace(complete, output=written.items))


def _finished(
    handler: RequestHandler, begun: ResponseBody, receipts: ReceiptWriter | None, written: Output
) -> ResponseBody:
    complete = finished(begun, chat_usage(handler), written.finish_reason)
    receipt = UNSET if receipts is None else receipts.write(handler.outputs, num_choices=1)
    return msgspec.structs.replace(complete, receipt=receipt)


class _ResponseEvents:
    """Encodes and numbers the events of a stream.

    response.completed, response.incomplete or response.failed ends it; no `data: [DONE]` follows.
    """

    def __init__(self, handler: RequestHandler, begun: ResponseBody, receipts: ReceiptWriter | None) -> None:
        self._handler = handler
        self._begun = begun
        self._receipts = receipts
        self._output = Output(handler.rendered)
        self._number = 0

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._encode([ItemEvent(kind, {"response": self._begun}) for kind in kinds])

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        del index  # there is one generation
        return self._encode(self._output.add(delta))

    def end(self) -> bytes:
        response = _finished(self._handler, self._begun, self._receipts, self._output)
        return self._end(response, "completed" if response.status == "completed" else "incomplete")

    def fail(self, error: APIError) -> bytes:
        return self._end(
            msgspec.structs.replace(self._begun, status="failed", error=ResponseError(error.message)), "incomplete"
        )

    def _end(self, response: ResponseBody, last_status: ItemStatus) -> bytes:
        closing = self._encode(self._output.close(last_status))
        kind = "incomplete" if response.status == "cancelled" else response.status
        complete = msgspec.structs.replace(response, output=self._output.items)
        return closing + self._encode([ItemEvent(f"response.{kind}", {"response": complete})])

    def _encode(self, events: Iterable[ItemEvent]) -> bytes:
        encoded = []
        for event in events:
            body = msgspec.json.encode({"type": event.kind, "sequence_number": self._number, **event.fields})
            self._number += 1
            encoded.append(b"event: " + event.kind.encode() + b"\ndata: " + body + b"\n\n")
        return b"".join(encoded)
