"""Tools of a chat request: their description in the prompt, and the grammar of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen.core.request import Grammar, RequestError
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.messages import Choice, Tool, with_text
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.text.grammar import MOST_GRAMMAR_BYTES, arguments_grammar
from fastgen.text.schemas.errors import SchemaError
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.parser import Machine
from fastgen.text.tools.registry import ANY_ARGUMENTS, call_grammar, describe, free_grammar

# Rules of one tool besides its schema, about.
_BYTES_PER_TOOL = 256
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call.

    Attributes:
        tools, offered: the tools, for chat templates and for the tool-call format.
        required: tools of which one must be called; empty if the model may reply with content.
        max_calls: most calls per choice; None for no limit.
        must_hold: names of the tools whose schema is enforced because the request says so, not by default.
        unenforced: names of the tools that any object may be the arguments of.
    """

    format: ToolFormat
    tools: list[dict[str, Any]]
    required: tuple[OfferedTool, ...]
    offered: tuple[OfferedTool, ...]
    max_calls: int | None
    must_hold: frozenset[str] = frozenset()
    unenforced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, body: ChatRequest, model: ServedModel) -> ToolUse | None:
        """Return the tools of a request; None if the model may not call any.

        Raises:
            RequestError: if the request requires a call of a tool that it does not define.
        """
        choice, tools = body.tool_choice or Choice("auto"), body.tools or []
        is_required = choice.mode == "required"
        if choice.name is not None and choice.name not in [tool.function.name for tool in tools]:
            raise field_error("tool_choice", f"{choice.name!r} is not a function in tools; name one that is")
        if is_required and not tools:
            raise field_error("tool_choice", "a call is required and tools is empty; add a tool")
        if not tools or choice.mode == "none":
            return None
        # Not by default where text before a call could not begin with a brace or bracket: answers may be JSON.
        strict = body.is_strict_by_default and (is_required or bool(model.tool_format.opening))
        offered = tuple(_offered(tool, strict=strict) for tool in tools)
        required = offered if is_required else ()
        if choice.name is not None:
            required = tuple(tool for tool in offered if tool.name == choice.name)[:1]
        return cls(
            format=model.tool_format,
            tools=[tool.for_template() for tool in tools],
            required=required,
            offered=offered,
            max_calls=1 if choice.name is not None or body.parallel_tool_calls is False else None,
            must_hold=frozenset(
                tool.function.name
                for tool in tools
                if tool.function.strict or (is_required and not body.is_strict_by_default)
            ),
        )

    def parser(self) -> Machine:
        """Return a parser for one generation."""
        return self.format.parser(self.offered)

    async def constrain(
        self, model: ServedModel, structure: tuple[Grammar, str] | None, excluded: Sequence[str] = ()
    ) -> tuple[ToolUse, tuple[Grammar, str] | None]:
        """Return these tools as far as their schemas can be enforced; and the checked grammar, with its field.

        A schema that cannot be enforced is not, unless it must hold: then any object may be the arguments.

        Args:
            model: the served model.
            structure: the grammar that the content must match and its field, if any.
            excluded: marks that free text before a call must not contain.

        Raises:
            RequestError: if `structure` is not JSON or invalid, or a schema that must hold cannot be enforced.
            APIError: if grammars cannot be checked now.
        """
        if structure is not None:
            _check_combination(*structure)
            await model.grammars.checked(structure)
        try:
            return self, await self._checked(model, structure, excluded)
        except RequestError:
            relaxed = await self._relaxed(model)
        try:
            return relaxed, await relaxed._checked(model, structure, excluded)
        except RequestError:  # together, the schemas are too much
            if self.must_hold:
                raise
        free = self._enforcing(frozenset())
        return free, await free._checked(model, structure, excluded)

    async def _checked(
        self, model: ServedModel, structure: tuple[Grammar, str] | None, excluded: Sequence[str]
    ) -> tuple[Grammar, str] | None:
        # In a thread, because schemas may be large.
        found = await asyncio.to_thread(self.grammar, model, structure, excluded)
        await model.grammars.checked(found)
        return found

    def grammar(
        self, model: ServedModel, structure: tuple[Grammar, str] | None, excluded: Sequence[str] = ()
    ) -> tuple[Grammar, str] | None:
        """Return the grammar that the output must match and the field that it comes from, if any; see `constrain`.

        The output is calls if they are required, otherwise calls or content that matches `structure`. Without a
        structure, text before a call is free.

        Raises:
            RequestError: if a schema cannot be enforced.
        """
        most, offered = self.max_calls, self._enforced(self.offered)
        try:
            if self.required:
                required = self._enforced(self.required)
                return call_grammar(self.format, required, model.tokenizer, most_calls=most), "tools"
            if structure is not None:
                answer, field = structure
                return call_grammar(self.format, offered, model.tokenizer, most_calls=most, answer=answer), field
            if not any(tool.strict for tool in offered):
                return None
            free = free_grammar(self.format, offered, model.tokenizer, most_calls=most, excluded=excluded)
            return free, "tools"
        except SchemaError as error:
            raise field_error("tools", f"{error}") from None

    def _enforced(self, tools: Sequence[OfferedTool]) -> list[OfferedTool]:
        return [replace(tool, schema=ANY_ARGUMENTS) if tool.name in self.unenforced else tool for tool in tools]

    def _enforcing(self, names: frozenset[str]) -> ToolUse:
        """Return a use of the tools in which only the schemas of `names` are enforced."""
        offered = [replace(tool, strict=tool.strict and tool.name in names) for tool in self.offered]
        return replace(
            self,
            offered=tuple(offered),
            unenforced=frozenset(tool.name for tool in self.offered) - names,
        )

    async def _relaxed(self, model: ServedModel) -> ToolUse:
        """Return a use of the tools in which only those schemas are enforced that can be, and fit into one grammar.

        Raises:
            RequestError: names a tool whose schema must hold.
        """
        names, size = set(), 0
        for tool in self.required or self.offered:
            size += len(json.dumps(tool.schema)) + _BYTES_PER_TOOL
            try:
                if size <= MOST_GRAMMAR_BYTES or tool.name in self.must_hold:
                    await model.grammars.check(await asyncio.to_thread(arguments_grammar, tool.schema), "tools")
                    names.add(tool.name)
            except ValueError as error:
                if tool.name in self.must_hold:
                    fault = str(error).removeprefix("tools: ")
                    raise field_error("tools", f"the parameters of {tool.name}: {fault}") from None
        return self._enforcing(frozenset(names))

    def describe_in(self, messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return variants of the messages that describe the tools, in order of preference.

        They serve chat templates without tools. The description is in the system message or, because some templates
        reject system messages, in the first user message.
        """
        description, first = describe(self.format, self.tools), messages[0]
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


def _offered(tool: Tool, *, strict: bool) -> OfferedTool:
    """Return a tool for the tool-call format; `strict` applies if the function does not say."""
    function = tool.function
    is_strict = strict if function.strict is None else function.strict
    return OfferedTool(function.name, function.parameters or _NO_ARGUMENTS, is_strict)
