"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.core.request import RequestError, SamplingParams
from fastgen.server.exchange import Exchange
from fastgen.server.lifecycle import ServedModel
from fastgen.server.limits import JSONRoute
from fastgen.server.protocol import ChatRequest
from fastgen.server.responses import AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta
from fastgen.server.service import Service, encode, room_after
from fastgen.server.streaming import EventStream, event, while_connected
from fastgen.text.chat import ChatTemplateError

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers the conversation."""
    service: Service = request.app.state.service
    model, name = service.lifecycle.model(), service.check_model(body.model)
    exchange = service.open_exchange("chatcmpl", model, [await _prompt(body, model)], body.stops)
    if body.stream:
        return EventStream(_stream(exchange, name, include_usage=body.include_usage))
    return await while_connected(request, _whole(exchange, name))


def render(body: ChatRequest, model: ServedModel) -> str:
    """The conversation as the model's template puts it.

    Raises:
        RequestError: when there is no template, or it refuses the messages.
    """
    template = model.tokenizer.chat_template
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions", "messages")
    try:
        return template.render([message.for_template() for message in body.messages])
    except ChatTemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error


async def _prompt(body: ChatRequest, model: ServedModel) -> tuple[list[int], SamplingParams]:
    tokens = await encode(model.tokenizer, render(body, model), add_special_tokens=False)
    return tokens, body.sampling(body.token_limit(room_after(model, len(tokens))))


async def _whole(exchange: Exchange, name: str) -> Response:
    with exchange:
        choices = [
            ChatChoice(index, AssistantMessage(text), reason.value)
            for index, (text, reason) in enumerate(await exchange.texts())
        ]
    completion = ChatCompletion(exchange.id, exchange.created, name, choices, exchange.usage())
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(exchange: Exchange, name: str, *, include_usage: bool) -> AsyncGenerator[bytes]:
    no_usage_yet = None if include_usage else msgspec.UNSET

    def chunk(index: int, delta: Delta, finish_reason: str | None = None) -> bytes:
        choice = ChatChunkChoice(index, delta, finish_reason)
        return event(ChatChunk(exchange.id, exchange.created, name, [choice], no_usage_yet))

    begun = False
    with exchange:
        async with aclosing(exchange.deltas()) as deltas:
            async for index, delta in deltas:
                if not begun:
                    begun = True
                    yield chunk(index, Delta(role="assistant", content=""))
                if delta.text:
                    yield chunk(index, Delta(content=delta.text))
                if delta.finish_reason is not None:
                    yield chunk(index, Delta(), delta.finish_reason)
    if include_usage:
        yield event(ChatChunk(exchange.id, exchange.created, name, [], exchange.usage()))
