"""/v1/chat/completions: generate the next message of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import EventTemplate, event, while_connected
from fastgen.server.openai.chat.choices import ChatChunkWriter, chat_choice
from fastgen.server.openai.chat.rendering import rendered_chat
from fastgen.server.openai.chunk_events import ChunkEvents
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.logprobs import TokenText, prompt_logprobs
from fastgen.server.openai.receipts import ReceiptWriter
from fastgen.server.openai.response_bodies import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    CompletionUsage,
    Delta,
    json_response,
)
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.request_output import OutputDelta, RequestOutput

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    service: Service = request.app.state.service
    name = service.check_model(body.model)
    receipts = await chat_receipts(service, body, name)
    handler = await admit_chat(service, body, "chatcmpl")
    if body.stream:
        return TokenStream(handler, _ChatEvents(handler, name, body, receipts))
    return await while_connected(request, _complete(handler, name, body, receipts))


async def chat_receipts(service: Service, body: ChatRequest, name: str) -> ReceiptWriter | None:
    """Return what writes the receipt of a conversation, or None if none is requested.

    The model's files are read before a request is admitted, so that it does not wait for them with its place taken.

    Raises:
        RequestError: if the request is invalid.
        APIError: if the model has another task, or its files have changed since the server started.
    """
    if not body.receipt:
        return None
    body.check()
    return await ReceiptWriter.of(body, service.model_for("generate"), name)


async def admit_chat(service: Service, body: ChatRequest, id_prefix: str) -> RequestHandler:
    """Admit a conversation and return its handler.

    Raises:
        RequestError: if the model cannot serve it.
        APIError: if the server cannot serve it now, or has another task.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    model = service.model_for("generate")
    body.check()
    service.check_chat_template(body.chat_template)
    with client_names(body.aliases):
        ids = service.reserve(model, 1, body.num_choices)
        rendered = await rendered_chat(body, model)
        return service.handler(id_prefix, model, ids, rendered)


async def _complete(handler: RequestHandler, name: str, body: ChatRequest, receipts: ReceiptWriter | None) -> Response:
    with handler:
        outputs = await handler.finish()
    return await off_loop(_response, handler, name, body, receipts, outputs)


def _response(
    handler: RequestHandler,
    name: str,
    body: ChatRequest,
    receipts: ReceiptWriter | None,
    outputs: list[RequestOutput],
) -> Response:
    token_text, first = TokenText(handler.tokenizer, bool(body.return_tokens_as_token_ids)), outputs[0]
    completion = ChatCompletion(
        handler.id,
        handler.created,
        name,
        [chat_choice(index, output, handler.rendered, body, token_text) for index, output in enumerate(outputs)],
        chat_usage(handler),
        UNSET if body.prompt_logprobs is None else prompt_logprobs(token_text, first.prompt_logprobs or ()),
        first.request.prompt_token_ids if body.return_token_ids else UNSET,
        UNSET if receipts is None else receipts.write(outputs, body.num_choices),
        system_fingerprint=handler.fingerprint,
    )
    return json_response(completion)


class _ChatEvents(ChunkEvents[ChatRequest]):
    """Encodes the chunks of a stream. The first chunk of a choice carries the role."""

    chunk_type = ChatChunk

    def __init__(self, handler: RequestHandler, name: str, body: ChatRequest, receipts: ReceiptWriter | None) -> None:
        super().__init__(handler, name, body, receipts)
        self._token_text = TokenText(handler.tokenizer, bool(body.return_tokens_as_token_ids))
        self._writers: dict[int, ChatChunkWriter] = {}
        # The first chunk of a choice does not count the token that it comes with.
        self._chunk_usage = self._usage_so_far()

    def _chunks(self, index: int, delta: OutputDelta) -> bytes:
        first = b"" if index in self._writers else self._begin_choice(index)
        self._chunk_usage = self._usage_so_far()
        choices = self._writers[index].write(delta, self._handler.outputs[index])
        return first + b"".join([event(self._chunk(choice)) for choice in choices])

    def _begin_choice(self, index: int) -> bytes:
        is_first = not self._writers
        writer = ChatChunkWriter(index, self._handler.rendered, self._body, self._token_text)
        self._writers[index] = writer
        if writer.is_plain and not self._body.continuous_usage:
            self._templates[index] = EventTemplate(
                lambda text: self._chunk(ChatChunkChoice(index, Delta(content=text), None))
            )
        prompt = self._handler.outputs[0].request.prompt_token_ids
        role = ChatChunkChoice(index, Delta(role="assistant", content=""), None)
        return event(self._chunk(role, prompt if is_first and self._body.return_token_ids else UNSET))

    def _chunk(self, choice: ChatChunkChoice, prompt: list[int] | UnsetType = UNSET) -> ChatChunk:
        fingerprint = self._handler.fingerprint
        return ChatChunk(*self._head, [choice], self._chunk_usage, prompt, system_fingerprint=fingerprint)

    def _usage(self) -> CompletionUsage:
        return chat_usage(self._handler)


def chat_usage(handler: RequestHandler) -> CompletionUsage:
    """Return the usage of a finished request, with its reasoning counted."""
    format, start, counted = handler.rendered.reasoning, handler.rendered.start, None
    if format is not None:
        counted = sum(format.num_tokens(output.token_ids, start, handler.tokenizer) for output in handler.outputs)
    return CompletionUsage.of(handler.usage(), counted)
