"""Converts a chat request to the engine's request and what the parsers of its output need."""

from __future__ import annotations

import math
from typing import Any

from fastgen.core.sampling_params import Grammar
from fastgen.server.http.off_loop import off_loop
from fastgen.server.openai.chat.reasoning import reasoned, start_of, template_variables
from fastgen.server.openai.chat.tools import Tools, constrained, described, offered_tools
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.serving.encoding import encode_bad_words, encode_rendered
from fastgen.server.serving.held_memory import most_logprob_tokens
from fastgen.server.serving.served_model import ServedModel
from fastgen.settings import ConfigError
from fastgen.text.chat_template import ChatTemplate, ChatTemplateError
from fastgen.text.reasoning.format import Start
from fastgen.text.rendered_request import RenderedRequest


async def rendered_chat(body: ChatRequest, model: ServedModel) -> RenderedRequest:
    """Return what to generate for a conversation, and what the output means.

    Raises:
        RequestError: if the model cannot serve the request.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    tools, prompt, start = await off_loop(_prepared, body, model)
    tools, grammar = await _constrained(body, model, tools, start)
    model.prompt_size_limit.check(prompt, "messages")
    tokens = await encode_rendered(
        model.tokenizer, model.guarded, prompt, "messages", add_special_tokens=bool(body.add_special_tokens)
    )
    request = body.prompt_request(
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
    return body.rendered(
        [request],
        reasoning=model.reasoning_format,
        start=start,
        include_reasoning=body.include_reasoning is not False,
        tool_format=model.tool_format if tools else None,
        tools=tools,
        max_calls=body.max_calls,
    )


def chat_prompt(body: ChatRequest, model: ServedModel, tools: Tools) -> str:
    """Render the conversation with the request's chat template, or the model's.

    Raises:
        RequestError: if there is no valid chat template, or it rejects the messages or has no variable for the
            reasoning effort.
    """
    template = _chat_template(body, model)
    messages = [message.for_template() for message in body.messages]
    functions = [tool.for_template() for tool in body.tools or []] if tools else None
    source = template.tool_source if tools else template.source
    if "developer" not in source:  # OpenAI's newer name of the system role
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    variants = [messages]
    if functions is not None and not template.takes_tools:
        variants = described(messages, functions, model.tool_format)
    context: dict[str, Any] = {
        "tools": functions,
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
    raise field_error("messages", f"the chat template rejects them: {rejection}") from rejection


def _chat_template(body: ChatRequest, model: ServedModel) -> ChatTemplate:
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


def _prepared(body: ChatRequest, model: ServedModel) -> tuple[Tools, str, Start]:
    tools = offered_tools(body, model)
    prompt = chat_prompt(body, model, tools)
    return tools, prompt, start_of(body, model, prompt)


async def _constrained(
    body: ChatRequest, model: ServedModel, tools: Tools, start: Start
) -> tuple[Tools, Grammar | None]:
    """Return the tools, marked with whether their schemas are enforced, and the grammar of the output, if any.

    Raises:
        RequestError: if a grammar or a schema that must hold cannot be enforced, or fields contradict each other.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    structure, format = body.structure(), model.reasoning_format
    if tools:
        excluded = () if format is None else format.excluded(start)
        tools, structure = await constrained(tools, model, body.max_calls, structure, excluded)
    else:
        await model.grammars.admitted(structure)
    answer, field = structure or (None, "thinking_token_budget")
    grammar = reasoned(answer, body, model, start, offers_tools=bool(tools))
    if grammar is not None and format is not None:
        await model.grammars.admit(grammar, field)
    return tools, grammar
