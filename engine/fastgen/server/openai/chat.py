"""/v1/chat/completions: generate the next message of a conversation."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from fastgen.config import ConfigError
from fastgen.core.request import Grammar
from fastgen.core.request import Request as EngineRequest
from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import EventTemplate, event, while_connected
from fastgen.server.openai.chat_choices import ChatChunkWriter, ChoiceOptions, chat_choice
from fastgen.server.openai.chunk_events import ChunkEvents
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.logprobs import TokenText, prompt_logprobs
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.openai.reasoning import ReasoningUse, template_variables
from fastgen.server.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    CompletionUsage,
    Delta,
    json_response,
)
from fastgen.server.openai.tool_calling import ToolUse
from fastgen.server.serving.encoding import encode_bad_words, encode_rendered
from fastgen.server.serving.held_memory import most_logprob_tokens
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.request_handler import OutputOptions, RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.chat import ChatTemplate, ChatTemplateError
from fastgen.text.reasoning import Start
from fastgen.text.request_output import OutputDelta, RequestOutput

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    service: Service = request.app.state.service
    name = service.check_model(body.model)
    handler, options = await admit_chat(service, body, "chatcmpl")
    if body.stream:
        return TokenStream(handler, _StreamEvents(handler, name, options))
    return await while_connected(request, _complete(handler, name, options))


async def admit_chat(service: Service, body: ChatRequest, id_prefix: str) -> tuple[RequestHandler, ChoiceOptions]:
    """Admit a conversation and return its handler and how its generations become choices.

    Raises:
        RequestError: if the model cannot serve it.
        APIError: if the server cannot serve it now.
    """
    model = service.model_for("generate")
    body.check()
    service.check_chat_template(body.chat_template)
    with client_names(body.aliases):
        places = service.reserve(model, 1, body.num_choices)
        tools, prompt, reasoning = await off_loop(_prepared, body, model)
        marks = (*(tools.format.marks if tools else ()), *(reasoning.format.marks if reasoning else ()))
        shown = model.tokenizer.special_ids_of(marks)
        text = body.text_rules(shown, (reasoning.format, reasoning.start) if reasoning else None)
        options = OutputOptions(num_choices=body.num_choices, num_candidates=body.num_choices, text=text)
        tools, grammar = await _constrain(body, model, tools, reasoning)
        engine_request = await _engine_request(body, model, grammar, prompt)
        handler = service.handler(id_prefix, places, [engine_request], options)
    token_text = TokenText(model.tokenizer, bool(body.return_tokens_as_token_ids))
    return handler, ChoiceOptions(body, token_text, tools, reasoning)


def _prepared(body: ChatRequest, model: ServedModel) -> tuple[ToolUse | None, str, ReasoningUse | None]:
    tools = ToolUse.of(body, model)
    prompt = render(body, model, tools)
    return tools, prompt, ReasoningUse.of(body, model, prompt)


def render(body: ChatRequest, model: ServedModel, tools: ToolUse | None) -> str:
    """Render the conversation with the model's chat template.

    Raises:
        RequestError: if there is no chat template, or the template rejects the messages.
    """
    template = chat_template(body, model)
    messages = [message.for_template() for message in body.messages]
    source = template.source if tools is None else template.tool_source
    if "developer" not in source:  # OpenAI's newer name of the system role
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    variants = [messages] if tools is None or template.takes_tools else tools.describe_in(messages)
    context: dict[str, Any] = {
        "tools": None if tools is None else tools.tools,
        "documents": body.documents,
        "variables": template_variables(body, source),
        "control": model.control,
    }
    for conversation in variants:
        try:
            if body.continue_final_message:
                return template.render_unfinished(conversation, **context)
            return template.render(conversation, add_generation_prompt=body.opens_reply, **context)
        except ChatTemplateError as error:
            rejection = error
    raise field_error("messages", f"the model's chat template rejects them: {rejection}") from rejection


def chat_template(body: ChatRequest, model: ServedModel) -> ChatTemplate:
    """Return the request's chat template if it has one, otherwise the model's.

    Raises:
        RequestError: if the request's template is not valid Jinja, or there is none.
    """
    template = model.tokenizer.chat_template
    if body.chat_template is None:
        if template is None:
            raise field_error("messages", "this model has no chat template; use /v1/completions")
        return template
    try:
        return ChatTemplate(body.chat_template, {}) if template is None else template.replaced(body.chat_template)
    except ConfigError as error:
        raise field_error("chat_template", str(error).removeprefix("chat template: ")) from None


async def _constrain(
    body: ChatRequest, model: ServedModel, tools: ToolUse | None, reasoning: ReasoningUse | None
) -> tuple[ToolUse | None, Grammar | None]:
    """Return the tools as far as they are enforced, and the grammar of the output."""
    structure = body.structure()
    if tools is None:
        await model.grammars.checked(structure)
    else:
        # Reasoning that a generation may open must not match as the text before a call.
        opens = reasoning is not None and reasoning.start is Start.OPEN
        tools, structure = await tools.constrain(
            model, structure, [reasoning.format.opening] if reasoning and opens else []
        )
    grammar, field = structure or (None, "thinking_token_budget")
    if reasoning is not None:
        grammar = reasoning.grammar(grammar)
        if grammar is not None:
            await model.grammars.check(grammar, field)
    return tools, grammar


async def _engine_request(body: ChatRequest, model: ServedModel, grammar: Grammar | None, text: str) -> EngineRequest:
    model.prompt_size_limit.check(text, "messages")
    tokens = await encode_rendered(
        model.tokenizer, model.guarded, text, "messages", add_special_tokens=bool(body.add_special_tokens)
    )
    return body.prompt_request(
        tokens,
        model,
        min(
            model.generation_defaults.get("max_tokens", math.inf),
            most_logprob_tokens(body.num_logprobs, body.num_choices),
        ),
        logprobs=body.num_logprobs,
        grammar=grammar,
        bad_words=await encode_bad_words(body.bad_words, model.tokenizer),
    )


async def _complete(handler: RequestHandler, name: str, options: ChoiceOptions) -> Response:
    with handler:
        outputs = await handler.finish()
    return await off_loop(_response, handler, name, options, outputs)


def _response(handler: RequestHandler, name: str, options: ChoiceOptions, outputs: list[RequestOutput]) -> Response:
    body, first = options.body, outputs[0]
    completion = ChatCompletion(
        handler.id,
        handler.created,
        name,
        [chat_choice(index, output, options) for index, output in enumerate(outputs)],
        chat_usage(handler, options),
        UNSET if body.prompt_logprobs is None else prompt_logprobs(options.token_text, first.prompt_logprobs or ()),
        first.request.prompt_token_ids if body.return_token_ids else UNSET,
    )
    return json_response(completion)


class _StreamEvents(ChunkEvents[ChatRequest]):
    """Encodes the chunks of a stream. The first chunk of a choice carries the role."""

    chunk_type = ChatChunk

    def __init__(self, handler: RequestHandler, name: str, options: ChoiceOptions) -> None:
        super().__init__(handler, name, options.body)
        self._options = options
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
        writer = self._writers[index] = ChatChunkWriter(index, self._options)
        if writer.is_plain and not self._body.continuous_usage:
            self._templates[index] = EventTemplate(
                lambda text: self._chunk(ChatChunkChoice(index, Delta(content=text), None))
            )
        prompt = self._handler.outputs[0].request.prompt_token_ids
        role = ChatChunkChoice(index, Delta(role="assistant", content=""), None)
        return event(self._chunk(role, prompt if is_first and self._body.return_token_ids else UNSET))

    def _chunk(self, choice: ChatChunkChoice, prompt: list[int] | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(*self._head, [choice], self._chunk_usage, prompt)

    def _usage(self) -> CompletionUsage:
        return chat_usage(self._handler, self._options)


def chat_usage(handler: RequestHandler, options: ChoiceOptions) -> CompletionUsage:
    """Return the usage of a finished request, with its reasoning counted."""
    reasoning = options.reasoning
    counted = None if reasoning is None else sum(reasoning.num_tokens(output) for output in handler.outputs)
    return CompletionUsage.of(handler.usage(), counted)
