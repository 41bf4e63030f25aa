"""A client's request as the engine and the parsers of its output read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import Request
from fastgen.text.reasoning.format import ReasoningFormat, Start
from fastgen.text.tools.format import OfferedTool, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRequest:
    """What to generate, and what the generated tokens mean.

    Attributes:
        requests: the engine's requests, one per prompt, without ids: tokens, sampling parameters and grammar.
        num_choices: choices per prompt.
        num_candidates: generations per prompt; those with the highest mean logprob become the choices.
        prompt_only: return only the prompt and its logprobs, no generated token.
        echo: the text follows that of the prompt, so it may complete a character that the prompt begins.
        stop: stop strings; the first one found in the answer ends the text. One may name special tokens.
        include_stop: keep the stop string, or the text of the stop token, at the end of the text.
        skip_special_tokens: leave special tokens out of the text, except the marks of reasoning and calls.
        reasoning: marks of the reasoning before the answer; None if all text is the answer.
        start: whether generations start before, inside or after the reasoning.
        include_reasoning: whether responses contain the reasoning.
        tool_format: how the model writes calls; None if it may call no tool.
        tools: the tools that it may call.
        max_calls: most calls per choice; None for no limit.
    """

    requests: Sequence[Request]
    num_choices: int = 1
    num_candidates: int = 1
    prompt_only: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    reasoning: ReasoningFormat | None = None
    start: Start = Start.AFTER
    include_reasoning: bool = True
    tool_format: ToolFormat | None = None
    tools: tuple[OfferedTool, ...] = ()
    max_calls: int | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Text that the parsers of the output look for."""
        return tuple(
            mark for format in (self.tool_format, self.reasoning) if format is not None for mark in format.marks
        )
