"""/v1/completions: texts or tokens, continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.core.request import SamplingParams
from fastgen.server.exchange import Exchange
from fastgen.server.lifecycle import ServedModel
from fastgen.server.limits import JSONRoute
from fastgen.server.protocol import CompletionRequest
from fastgen.server.responses import Completion, CompletionChoice
from fastgen.server.service import Service, encode, room_after
from fastgen.server.streaming import EventStream, event, while_connected

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues each prompt."""
    service: Service = request.app.state.service
    model, name = service.lifecycle.model(), service.check_model(body.model)
    prompts = [await _prompt(body, prompt, model) for prompt in body.prompts]
    exchange = service.open_exchange("cmpl", model, prompts, body.stops)
    if body.stream:
        return EventStream(_stream(exchange, name, include_usage=body.include_usage))
    return await while_connected(request, _whole(exchange, name))


async def _prompt(
    body: CompletionRequest, prompt: str | list[int], model: ServedModel
) -> tuple[list[int], SamplingParams]:
    tokens = await encode(model.tokenizer, prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    return tokens, body.sampling(body.token_limit(room_after(model, len(tokens))))


async def _whole(exchange: Exchange, name: str) -> Response:
    with exchange:
        choices = [
            CompletionChoice(index, text, reason.value) for index, (text, reason) in enumerate(await exchange.texts())
        ]
    completion = Completion(exchange.id, exchange.created, name, choices, exchange.usage())
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(exchange: Exchange, name: str, *, include_usage: bool) -> AsyncGenerator[bytes]:
    no_usage_yet = None if include_usage else msgspec.UNSET
    with exchange:
        async with aclosing(exchange.deltas()) as deltas:
            async for index, delta in deltas:
                choice = CompletionChoice(index, delta.text, delta.finish_reason)
                yield event(Completion(exchange.id, exchange.created, name, [choice], no_usage_yet))
    if include_usage:
        yield event(Completion(exchange.id, exchange.created, name, [], exchange.usage()))
