"""Tools of a chat request: their description in the prompt, and the grammar of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.server.openai.fields.messages import with_text
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.grammars.lark import arguments_grammar
from fastgen.text.grammars.limits import MOST_GRAMMAR_BYTES
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.registry import call_grammar, describe_tools, free_grammar

# Approximate size of the rules of one tool besides its schema.
_BYTES_PER_TOOL = 256
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

Tools = tuple[OfferedTool, ...]
# A grammar and the field of the request that it comes from.
Structure = tuple[Grammar, str]


def offered_tools(body: ChatRequest, model: ServedModel) -> Tools:
    """Return the tools that the model may call.

    Raises:
        RequestError: if the request requires a call, and defines no tool, or not one that it names.
    """
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or []]
    names, is_required = {function.name for function in functions}, choice.mode == "required"
    allowed = names if choice.functions is None else set(choice.functions)
    if unknown := sorted(allowed - names):
        raise field_error("tool_choice", f"{unknown[0]!r} is not a function in tools; name one that is")
    if is_required and not functions:
        raise field_error("tool_choice", "a call is required and tools is empty; add a tool")
    if choice.mode == "none":
        return ()
    for name in sorted(allowed):
        if not model.tool_format.can_call(name):
            raise field_error(
                "tools",
                f"calls of a function with the name {name[:80]!r} cannot be parsed in this model's format; use "
                "letters, digits, underscores and dashes",
            )
    # Without an opening mark, a grammar of calls forbids answers that begin with a brace or bracket, but answers may be
    # JSON.
    has_opening = bool(model.tool_format.opening)
    strict = body.is_strict_by_default and (is_required or has_opening)
    return tuple(
        OfferedTool(
            function.name,
            function.parameters or _NO_ARGUMENTS,
            strict=strict if function.strict is None else function.strict,
            required=is_required,
            exclusive=choice.functions is not None and has_opening,
            must_hold=bool(function.strict) or (is_required and not body.is_strict_by_default),
        )
        for function in functions
        if function.name in allowed
    )


async def constrained(
    tools: Tools,
    model: ServedModel,
    max_calls: int | None,
    structure: Structure | None,
    excluded: Sequence[str] = (),
) -> tuple[Tools, Structure | None]:
    """Return the tools, marked with whether their schemas are enforced, and the grammar of the output, if any.

    The grammar has been checked. If a schema cannot be enforced, the request is rejected if it must hold; otherwise the
    arguments may be any object.

    Args:
        tools: one or more.
        model: the served model.
        max_calls: most calls per choice; None for no limit.
        structure: the grammar that the content must match, if any.
        excluded: marks that free text before a call must not contain.

    Raises:
        RequestError: if `structure` is not JSON or invalid, or a schema that must hold cannot be enforced.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    if structure is not None:
        _check_combination(*structure)
        await model.grammars.admitted(structure)

    async def checked(tools: Tools) -> tuple[Tools, Structure | None]:
        # In a thread, because schemas may be large.
        found = await asyncio.to_thread(tools_grammar, tools, model, max_calls, structure, excluded)
        await model.grammars.admitted(found)
        return tools, found

    try:
        return await checked(tools)
    except RequestError:
        relaxed = await _relaxed(tools, model)
    try:
        return await checked(relaxed)
    except RequestError:  # together, the schemas are too much
        if any(tool.must_hold for tool in tools):
            raise
    return await checked(tuple(_unenforced(tool) for tool in tools))


def tools_grammar(
    tools: Tools,
    model: ServedModel,
    max_calls: int | None = None,
    structure: Structure | None = None,
    excluded: Sequence[str] = (),
) -> Structure | None:
    """Return the grammar that the output must match, if any; see `constrained`.

    The output is calls if they are required, otherwise calls or content that matches `structure`. Without a structure,
    text before a call is free.

    Raises:
        RequestError: if a schema cannot be enforced.
    """
    format, tokenizer = model.tool_format, model.tokenizer
    required = [tool for tool in tools if tool.required]
    try:
        if required:
            return call_grammar(format, required, tokenizer, most_calls=max_calls), "tools"
        if structure is not None:
            answer, field = structure
            return call_grammar(format, tools, tokenizer, most_calls=max_calls, answer=answer), field
        if not any(tool.strict or tool.exclusive for tool in tools):
            return None
        return free_grammar(format, tools, tokenizer, most_calls=max_calls, excluded=excluded), "tools"
    except SchemaError as error:
        raise field_error("tools", f"{error}") from None


async def _relaxed(tools: Tools, model: ServedModel) -> Tools:
    """Return the tools with only those schemas enforced that can be, and fit into one grammar.

    Raises:
        RequestError: if a schema that must hold cannot be enforced; names its tool.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    has_required, relaxed, size = any(tool.required for tool in tools), list[OfferedTool](), 0
    for tool in tools:
        holds = False
        if tool.required or not has_required:
            size += len(json.dumps(tool.schema)) + _BYTES_PER_TOOL
            try:
                if size <= MOST_GRAMMAR_BYTES or tool.must_hold:
                    await model.grammars.admit(await asyncio.to_thread(arguments_grammar, tool.schema), "tools")
                    holds = True
            except ValueError as error:
                if tool.must_hold:
                    fault = str(error).removeprefix("tools: ")
                    raise field_error("tools", f"the parameters of {tool.name}: {fault}") from None
        relaxed.append(tool if holds else _unenforced(tool))
    return tuple(relaxed)


def _unenforced(tool: OfferedTool) -> OfferedTool:
    return replace(tool, strict=False, enforced=False)


def described(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], format: ToolFormat
) -> list[list[dict[str, Any]]]:
    """Return variants of the messages that describe the tools, in order of preference.

    They serve chat templates without tools. The description is in the system message or, because some templates
    reject system messages, in the first user message.
    """
    description, first = describe_tools(format, tools), messages[0]
    if first["role"] == "system":
        return [[{**first, "content": with_text(first["content"], after=f"\n\n{description}")}, *messages[1:]]]
    with_system = [{"role": "system", "content": description}, *messages]
    if first["role"] != "user":
        return [with_system]
    content = with_text(first["content"], before=f"{description}\n\n")
    return [with_system, [{**first, "content": content}, *messages[1:]]]


def _check_combination(structure: Grammar, field: str) -> None:
    if structure.kind == "tokens":
        raise field_error(field, "cannot be combined with tools; leave one of them out")
    if structure.kind not in ("json_schema", "json_object"):
        raise field_error(field, "only JSON structures can be combined with tools; leave one of them out")
