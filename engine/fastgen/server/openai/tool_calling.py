"""The tools of one chat request: what the model is told of them, and what it must or may do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.core.request import Grammar, RequestError
from fastgen.server.openai.messages import Tool
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.text.tools.events import ToolParser
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.registry import call_grammar, describe, shown_tokens

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call.

    Attributes:
        tools: what is offered, as templates expect it.
        offered: the same, for the format.
        required: those of which one must be called; empty where the model is free to answer.
        most_calls: in one answer; None is no limit.
    """

    format: ToolFormat
    tools: list[dict[str, Any]]
    required: tuple[OfferedTool, ...]
    offered: tuple[OfferedTool, ...]
    most_calls: int | None

    @classmethod
    def of(cls, body: ChatRequest, model: ServedModel) -> ToolUse | None:
        """What a request says about tools; None where none may be called.

        Raises:
            RequestError: when it demands a call of a tool that it does not offer.
        """
        choice, tools = body.tool_choice, body.tools or []
        if choice is not None and choice.mode == "required":
            names = [tool.function.name for tool in tools]
            if choice.name is not None and choice.name not in names:
                raise RequestError(f"tool_choice: tools has no function {choice.name!r}", "tool_choice")
            if not tools:
                raise RequestError("tool_choice: a call is required, and tools offers none", "tool_choice")
        if not tools or (choice is not None and choice.mode == "none"):
            return None
        offered = tuple(_offered(tool) for tool in tools)
        required = offered if choice is not None and choice.mode == "required" else ()
        single = body.parallel_tool_calls is False
        if choice is not None and choice.name is not None:
            required, single = tuple(tool for tool in offered if tool.name == choice.name)[:1], True
        return cls(
            format=model.tool_format,
            tools=[tool.for_template() for tool in tools],
            required=required,
            offered=offered,
            most_calls=1 if single else None,
        )

    def parser(self) -> ToolParser:
        """A reader of one answer."""
        return self.format.parser(self.offered)

    def shown_tokens(self, model: ServedModel) -> frozenset[int]:
        """The special tokens that the reader must see."""
        return shown_tokens(self.format, model.tokenizer)

    def grammar(self, model: ServedModel, structure: tuple[Grammar, str] | None) -> tuple[Grammar, str] | None:
        """What the answer must match, and the field that says so; `structure` is what its content must match.

        A required call leaves no content. A free model may either call or keep to the structure.

        Raises:
            RequestError: when the structure is not JSON, which alone can stand beside calls.
        """
        if self.required:
            grammar = call_grammar(self.format, self.required, model.tokenizer, most_calls=self.most_calls)
            return grammar, "tools"
        if structure is None:
            return None
        content, field = structure
        if content.kind not in ("json_schema", "json_object"):
            raise RequestError(f"{field}: goes with tools only where it asks for JSON; leave one of them out", field)
        either = call_grammar(self.format, self.offered, model.tokenizer, most_calls=self.most_calls, answer=content)
        return either, field

    def tell(self, messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The messages with the tools told, for models whose template has no place for tools, the best way first.

        The system tells of them, else the first question does: some templates refuse messages of a system.
        """
        told, first = describe(self.format, self.tools), messages[0]
        if first["role"] == "system":
            return [[{**first, "content": f"{first['content']}\n\n{told}"}, *messages[1:]]]
        by_system = [{"role": "system", "content": told}, *messages]
        if first["role"] != "user" or not isinstance(first["content"], str):
            return [by_system]
        return [by_system, [{**first, "content": f"{told}\n\n{first['content']}"}, *messages[1:]]]


def _offered(tool: Tool) -> OfferedTool:
    return OfferedTool(tool.function.name, tool.function.parameters or _NO_ARGUMENTS)
