"""Reasoning of a chat request: variables of the chat template, where it starts, and the grammar of the output."""

from __future__ import annotations

import re
from typing import Any

from fastgen.core.sampling_params import Grammar
from fastgen.server.openai.fields.messages import text_of
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.reasoning.format import Start

# Variables that turn reasoning on and off: Qwen3's and DeepSeek-V3.1's.
_SWITCHES = ("enable_thinking", "thinking")


def template_variables(body: ChatRequest, source: str) -> dict[str, Any]:
    """Return the variables of the chat template `source`: the request's and those that its reasoning effort sets.

    Raises:
        RequestError: if the template has no variable for the effort.
    """
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    derived: dict[str, Any] = {"reasoning_effort": effort} if _reads(source, "reasoning_effort") else {}
    switch = next((name for name in _SWITCHES if _reads(source, name)), None)
    if switch is not None:
        derived[switch] = effort != "none"
    if not derived:
        raise field_error("reasoning_effort", "the chat template has no variable for it; leave it out")
    return {**derived, **variables}


def _reads(source: str, variable: str) -> bool:
    """Return whether a template reads a variable, as opposed to a key or a text of that name."""
    return any(
        re.search(rf"(?<![\w.'\"]){variable}(?![\w'\"])", block)
        for block in re.findall(r"\{[{%].*?[%}]\}", source, re.S)
    )


def start_of(body: ChatRequest, model: ServedModel, prompt: str) -> Start:
    """Return whether generations after this rendered prompt start before, inside or after the reasoning.

    Without a reasoning format, all text is the answer, so they start after.

    Raises:
        RequestError: if the request has a thinking budget, and reasoning is not parsed or its closing mark is not a
            single token.
    """
    format, why = model.reasoning_format, None
    if format is None:
        why = "this model's reasoning is not parsed, see --reasoning-parser"
    elif format.closing_token(model.tokenizer) is None:
        why = f"the model's {format.closing} is not a single token"
    if body.thinking_token_budget is not None and why is not None:
        raise field_error("thinking_token_budget", f"{why}; leave it out")
    if format is None:
        return Start.AFTER
    last = body.messages[-1].content
    return format.start_within(text_of(last)) if body.continue_final_message else format.start_after(prompt)


def reasoned(
    answer: Grammar | None, body: ChatRequest, model: ServedModel, start: Start, *, offers_tools: bool
) -> Grammar | None:
    """Return the grammar of a generation whose answer, after the reasoning, matches `answer`.

    None if any text is allowed. A set of allowed tokens applies to the reasoning too, so it cannot be combined with a
    budget.

    Raises:
        RequestError: if a set of allowed tokens is combined with a budget.
    """
    budget = body.thinking_token_budget
    if model.reasoning_format is None:
        return answer
    if answer is not None and answer.kind == "tokens":
        if budget is not None:
            raise field_error(
                "thinking_token_budget", "cannot be combined with allowed_token_ids; leave one of them out"
            )
        return answer
    return model.reasoning_format.grammar(answer, model.tokenizer, start, budget, offers_tools=offers_tools)
