"""Tools of a chat request: their description in the prompt, and the grammar of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.request import Grammar
from fastgen.server.openai.fields.types import field_error
from fastgen.server.openai.messages import Choice, Tool, with_text
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.parser import Machine
from fastgen.text.tools.registry import call_grammar, describe, free_grammar

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call.

    Attributes:
        tools, offered: the tools, for chat templates and for the tool-call format.
        required: tools of which one must be called; empty if the model may reply with content.
        max_calls: most calls per choice; None for no limit.
    """

    format: ToolFormat
    tools: list[dict[str, Any]]
    required: tuple[OfferedTool, ...]
    offered: tuple[OfferedTool, ...]
    max_calls: int | None

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
        # Functions are not strict by default where the format cannot enforce it.
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
        )

    def parser(self) -> Machine:
        """Return a parser for one generation."""
        return self.format.parser(self.offered)

    def grammar(
        self, model: ServedModel, structure: tuple[Grammar, str] | None, excluded: Sequence[str] = ()
    ) -> tuple[Grammar, str] | None:
        """Return the grammar that the output must match and the field that it comes from, if any.

        The output is calls if they are required, otherwise calls or content that matches `structure`. Without a
        structure, text before a call is free.

        Args:
            model: the served model.
            structure: the grammar that the content must match and its field, if any.
            excluded: marks that free text before a call must not contain.

        Raises:
            RequestError: if `structure` is not JSON, or a function is strict and the format has no mark that begins a
                call.
        """
        if structure is not None and structure[0].kind == "tokens":
            raise field_error(structure[1], "cannot be combined with tools; leave one of them out")
        if self.required:
            grammar = call_grammar(self.format, self.required, model.tokenizer, most_calls=self.max_calls)
            return grammar, "tools"
        if structure is None:
            return self._strict_grammar(model, excluded)
        content, field = structure
        if content.kind not in ("json_schema", "json_object"):
            raise field_error(field, "only JSON structures can be combined with tools; leave one of them out")
        either = call_grammar(self.format, self.offered, model.tokenizer, most_calls=self.max_calls, answer=content)
        return either, field

    def _strict_grammar(self, model: ServedModel, excluded: Sequence[str]) -> tuple[Grammar, str] | None:
        """Return the grammar of free text and calls if a function is strict."""
        strict = next((tool for tool in self.offered if tool.strict), None)
        if strict is None:
            return None
        if not self.format.opening:
            raise field_error(
                "tools",
                f"{strict.name} is strict, which the tool format {self.format.name} cannot enforce while calls are "
                'optional; set tool_choice to "required" or to the function, or leave strict out',
            )
        grammar = free_grammar(self.format, self.offered, model.tokenizer, most_calls=self.max_calls, excluded=excluded)
        return grammar, "tools"

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


def _offered(tool: Tool, *, strict: bool) -> OfferedTool:
    """Return a tool for the tool-call format; `strict` applies if the function does not say."""
    function = tool.function
    is_strict = strict if function.strict is None else function.strict
    return OfferedTool(function.name, function.parameters or _NO_ARGUMENTS, is_strict)
