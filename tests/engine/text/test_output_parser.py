"""The parser splits the deltas of one generation into reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.core.request import FinishReason
from fastgen.text.output_events import CallArguments, CallBegun, Content, OutputEvent, Reasoning
from fastgen.text.output_parser import OutputParser
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.think import Think
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta
from fastgen.text.tools.format import OfferedTool
from fastgen.text.tools.hermes import Hermes

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS: dict[str, Any] = {"tool_format": Hermes(), "tools": (OfferedTool("f", {}),)}
THINKS: dict[str, Any] = {"reasoning": Think(), "start": Start.INSIDE}


def parsed(text: str, **meaning: Any) -> tuple[list[OutputEvent], OutputParser]:
    """Return the events of a complete generation."""
    parser = OutputParser(RenderedRequest(requests=[], **meaning))
    return parser.push(OutputDelta(text, finish_reason=FinishReason.STOP)), parser


def test_reasoning_comes_before_content_and_calls() -> None:
    events, _ = parsed(f"So.</think>Now:{CALL}", **THINKS, **TOOLS)
    assert events == [Reasoning("So."), Content("Now:"), CallBegun(0, "f"), CallArguments(0, '{"a": 1}')]


def test_marks_are_text_where_the_model_neither_thinks_nor_calls() -> None:
    events, parser = parsed(f"So.</think>{CALL}")
    assert events == [Content(f"So.</think>{CALL}")]
    assert parser.is_plain


def test_calls_beyond_the_most_allowed_are_dropped() -> None:
    events, _ = parsed(CALL + CALL, **TOOLS, max_calls=1)
    assert events == [CallBegun(0, "f"), CallArguments(0, '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "stop_reason", "ends"),
    [("No.", None, False), (CALL, None, True), (CALL, "x", True), (CALL[:-16], "x", False), (CALL[:-16], None, True)],
)
def test_a_call_that_the_clients_stop_string_cuts_does_not_end_the_generation(
    text: str, stop_reason: str | None, ends: bool
) -> None:
    _, parser = parsed(text, **TOOLS)
    assert parser.ends_with_call(stop_reason) == ends
