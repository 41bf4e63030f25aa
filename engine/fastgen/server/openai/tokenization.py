"""/tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import BaseModel

from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.chat.rendering import chat_prompt
from fastgen.server.openai.chat.tools import offered_tools
from fastgen.server.openai.fields.messages import Messages
from fastgen.server.openai.fields.types import Boolean, String, TokenIds, field_error
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.response_bodies import json_response
from fastgen.server.serving.encoding import encode_rendered
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.service import Service

router = APIRouter(route_class=JSONRoute)

# Clients may count the tokens of texts that are too long for the model. This many characters take about a second.
_MOST_CHARACTERS = 1 << 20


class TokenizeRequest(ChatRequest):
    """Body of /tokenize: a prompt, or the fields of /v1/chat/completions."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: String | None = None
    return_token_strs: Boolean | None = None


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model: String | None = None
    tokens: TokenIds


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Response of /tokenize; `token_strs` are the vocabulary's spellings, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Response of /detokenize."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a prompt or a conversation."""
    service: Service = request.app.state.service
    model = service.lifecycle.model()
    service.check_model(body.model)
    service.check_chat_template(body.chat_template)
    return await while_connected(request, _tokenize(body, model))


async def _tokenize(body: TokenizeRequest, model: ServedModel) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise field_error("prompt", "give either prompt or messages, not both")
    if body.prompt is not None:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    else:  # chat templates add special tokens themselves
        text, add_special_tokens = await off_loop(_rendered, body, model), body.add_special_tokens is True
    if len(text) > _MOST_CHARACTERS:
        model.prompt_size_limit.check(text, "prompt" if body.messages is None else "messages")
    guarded = None if body.messages is None else model.guarded
    tokens = await encode_rendered(model.tokenizer, guarded, text, "messages", add_special_tokens=add_special_tokens)
    token_strs = [model.tokenizer.backend.id_to_token(token) for token in tokens] if body.return_token_strs else UNSET
    return json_response(TokenizeResponse(len(tokens), model.engine.info.max_model_length, tokens, token_strs))


def _rendered(body: TokenizeRequest, model: ServedModel) -> str:
    return chat_prompt(body, model, offered_tools(body, model))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens."""
    service: Service = request.app.state.service
    model = service.lifecycle.model()
    service.check_model(body.model)
    size = model.engine.info.vocabulary_size
    invalid = next((token for token in body.tokens if not 0 <= token < size), None)
    if invalid is not None:
        raise field_error("tokens", f"{invalid} is not in the vocabulary; use ids from 0 to {size - 1}")
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))
