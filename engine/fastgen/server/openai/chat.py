"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.core.request import RequestError
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.sse import EventStream, event, while_connected
from fastgen.server.openai.chat_choices import AnswerStream, AnswerWriter
from fastgen.server.openai.logprobs import TokenNames, prompt_logprobs
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.openai.responses import ChatChunk, ChatChunkChoice, ChatCompletion
from fastgen.server.openai.tool_calling import ToolUse
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.outputs import Shape
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Prompt, Service, bad_word_tokens, called, checked, encode, room_after
from fastgen.text.chat import ChatTemplateError

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers the conversation."""
    service: Service = request.app.state.service
    model, name = service.lifecycle.model(), service.check_model(body.model)
    body.check()
    tools = ToolUse.of(body, model)
    shown = frozenset[int]() if tools is None else tools.shown_tokens(model)
    shape = Shape(num_choices=body.num_choices, num_candidates=body.num_choices, text=body.text_rules(shown))
    with called(body.aliases):
        service.check_number(model, 1, body.num_choices)
        prompt = await _prompt(body, model, tools)
        handler = service.open_handler("chatcmpl", model, [prompt], shape, body.terms())
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    writer = AnswerWriter(names if body.logprobs else None, tools)
    if body.stream:
        return EventStream(_stream(handler, name, body, writer))
    return await while_connected(request, _whole(handler, name, body, writer, names))


def render(body: ChatRequest, model: ServedModel, tools: ToolUse | None) -> str:
    """The conversation as the model's template puts it.

    Raises:
        RequestError: when there is no template, or it refuses the messages.
    """
    template = model.tokenizer.chat_template
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions", "messages")
    messages = [message.for_template() for message in body.messages]
    source = template.source if tools is None else template.tool_source
    if "developer" not in source:  # OpenAI's newer name for the system
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    ways = [messages] if tools is None or template.takes_tools else tools.tell(messages)
    context: dict[str, Any] = {
        "tools": None if tools is None else tools.tools,
        "documents": body.documents,
        "variables": body.chat_template_kwargs,
    }
    for conversation in ways:
        try:
            if body.continues:
                return template.render_unfinished(conversation, **context)
            return template.render(conversation, add_generation_prompt=body.opens_answer, **context)
        except ChatTemplateError as error:
            refusal = error
    raise RequestError(f"the model's chat template refuses these messages: {refusal}", "messages") from refusal


async def _prompt(body: ChatRequest, model: ServedModel, tools: ToolUse | None) -> Prompt:
    structure = body.structure()
    if tools is not None:
        structure = tools.grammar(model, structure)
    grammar = None if structure is None else await checked(*structure, model.tokenizer)
    text = render(body, model, tools)
    model.longest_text.check(text, "messages")
    (tokens,) = await encode(model.tokenizer, [text], add_special_tokens=bool(body.add_special_tokens))
    sampling = body.sampling(
        body.token_limit(room_after(model, len(tokens))),
        logprobs=body.num_logprobs,
        grammar=grammar,
        bad_words=await bad_word_tokens(body.bad_words, model.tokenizer),
    )
    return Prompt(tokens, sampling)


async def _whole(
    handler: RequestHandler, name: str, body: ChatRequest, writer: AnswerWriter, names: TokenNames
) -> Response:
    with handler:
        answers = await handler.answers()
    completion = ChatCompletion(
        handler.id,
        handler.created,
        name,
        [writer.whole(answer) for answer in answers],
        handler.usage(),
        msgspec.UNSET
        if body.prompt_logprobs is None
        else prompt_logprobs(names, answers[0].generation.prompt_logprobs),
    )
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(handler: RequestHandler, name: str, body: ChatRequest, writer: AnswerWriter) -> AsyncGenerator[bytes]:
    no_usage_yet = None if body.include_usage else msgspec.UNSET

    def chunk(choice: ChatChunkChoice) -> bytes:
        usage = handler.usage() if body.continuous_usage else no_usage_yet
        return event(ChatChunk(handler.id, handler.created, name, [choice], usage))

    streams: dict[int, AnswerStream] = {}
    with handler:
        async with aclosing(handler.pieces()) as pieces:
            async for index, piece in pieces:
                if index not in streams:
                    streams[index] = writer.stream(index)
                    yield chunk(streams[index].begin())
                for choice in streams[index].next(piece):
                    yield chunk(choice)
    if body.include_usage:
        yield event(ChatChunk(handler.id, handler.created, name, [], handler.usage()))
