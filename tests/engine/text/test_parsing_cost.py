"""What parsers of generations do is bounded by the length of the text, whatever a model writes without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastgen.core.request import FinishReason
from fastgen.text.output_events import Content
from fastgen.text.output_parser import OutputParser
from fastgen.text.reasoning.format import ReasoningFormat, Start
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.think import Think
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.json_text import JsonReader
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.parser import Machine
from fastgen.text.tools.plain_json import Llama3Json, PlainJson
from fastgen.text.tools.qwen3_coder import Qwen3Coder

TOOLS = (
    OfferedTool("f", {"properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}),
    OfferedTool("g", {}),
)
CALL = '{"name": "f", "arguments": {"a": 1}}'
# What a parser may examine again with the next text.
MOST_EXAMINED = 1500

# Where a generation is when it begins to repeat itself, by format.
OPENINGS: dict[ToolFormat, list[str]] = {
    Hermes(): [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        '<tool_call>{"name": "',
        f"<tool_call>{CALL[:-1]}",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        '<tool_call>{"arguments": {"a": "',
        f"<tool_call>{CALL}",
        f"<tool_call>{CALL}</tool_call>",
        f"<tool_call>[{CALL}",
    ],
    Qwen3Coder(): [
        "<tool_call>",
        "<tool_call><function=",
        "<tool_call><function=f>",
        "<tool_call><function=f><parameter=",
        "<tool_call><function=f><parameter=text>",
        "<tool_call><function=f><parameter=number>",
        "<tool_call><function=f><parameter=text>x</parameter>",
        "<tool_call><function=f></function>",
        "<tool_call><function=f></function></tool_call>",
    ],
    PlainJson(): [
        *("[", "{", '{"', "```", CALL, f"[{CALL}"),
        *('{"name": "f", "arguments": {"a": "', '{"arguments": {"a": "'),
    ],
    Llama3Json(): ["<|python_tag|>", CALL],
    Mistral(): ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS][", f"[TOOL_CALLS][{CALL}", '[TOOL_CALLS]{"'],
    MistralArguments(): ["[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS]f[ARGS]{"a": "', "[TOOL_CALLS]f[ARGS]{}"],
    Harmony(): ["<|channel|>", "<|end|>", '<|channel|>commentary to=functions.f<|message|>{"a": "'],
}
REASONING: dict[ReasoningFormat, list[str]] = {
    Think(): ["<think>", "<think>x", "<think>x</think>", "x"],
    HarmonyReasoning(): ["<|channel|>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>"],
}
# Texts that a generation repeats after it, each about as long as a token.
REPEATED = (
    *(" ", "\n", "a", '"', "\\", "{", "}", "[", "]", '{"', " }", "\t]", "```", "` `", "```json", "<", "</", ";", ","),
    *('{"x": 1,', '"name": "', '"type": "",', f"{CALL}; ", "} </tool_call> }", '<tool_call>{"x"', "f[ARGS]", "to=a"),
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=text>", "</parameter>", "</parameter>\n", "</function>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS] ", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", "</think"),
    *("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>final"),
)
SIZE, PIECES = 24, 100


def pieces_of(text: str) -> list[str]:
    piece = text * -(-SIZE // len(text))
    return [piece] * PIECES


def examined(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the texts that a parser, and what it refers to, has in one piece: it may look at them again."""
    if isinstance(value, str):
        yield value
    if id(value) in seen or isinstance(value, type | OfferedTool):
        return
    seen.add(id(value))
    if callable(value) and getattr(value, "__closure__", None):
        for cell in value.__closure__:
            yield from examined(cell.cell_contents, seen)
    if type(value).__module__.startswith("fastgen."):
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        for name in {*slots, *getattr(value, "__dict__", {})}:
            yield from examined(getattr(value, name), seen)


def longest_examined(make: Callable[[], Any], opening: str, repeated: str) -> int:
    parser = make()
    parser.push(opening)
    for piece in pieces_of(repeated):
        parser.push(piece)
    return max(map(len, examined(parser, set())), default=0)


@pytest.mark.parametrize("format", OPENINGS, ids=lambda format: type(format).__name__)
def test_a_tool_parser_examines_no_text_again_that_grows_without_end(format: ToolFormat) -> None:
    for opening in ["", *OPENINGS[format]]:
        for repeated in REPEATED:
            length = longest_examined(lambda: format.parser(TOOLS), opening, repeated)
            assert length <= MOST_EXAMINED, (opening, repeated)


@pytest.mark.parametrize("start", Start)
@pytest.mark.parametrize("format", REASONING, ids=lambda format: type(format).__name__)
def test_a_reasoning_parser_examines_no_text_again_that_grows_without_end(
    format: ReasoningFormat, start: Start
) -> None:
    for opening in ["", *REASONING[format]]:
        for repeated in REPEATED:
            for make in (format.parser, format.answer_finder):
                length = longest_examined(lambda make=make: make(start), opening, repeated)  # type: ignore[misc]
                assert length <= MOST_EXAMINED, (opening, repeated, make)


def test_a_long_text_is_examined_once_although_it_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_seen = 0

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(machine: Machine, *given: Any) -> Any:
            nonlocal num_seen
            num_seen += max(map(len, examined(machine, set())))
            return step(machine, *given)

        return counted

    for name in ("take_until", "drop", "show"):
        monkeypatch.setattr(Machine, name, counting(getattr(Machine, name)))
    for format, openings in OPENINGS.items():
        for opening in ["", *openings]:
            for repeated in (" ", "\n", "a", "}", " }"):
                text, num_seen = opening + repeated * (12_800 // len(repeated)) + "a", 0
                parser = format.parser(TOOLS)
                parser.push(text)
                parser.finish()
                assert num_seen <= 10 * len(text), (format, opening, repeated)


def test_text_that_looks_like_calls_again_and_again_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read, push = 0, JsonReader.push

    def counting(self: JsonReader, text: str) -> tuple[str, str | None]:
        nonlocal num_read
        num_read += len(text)
        return push(self, text)

    monkeypatch.setattr(JsonReader, "push", counting)
    for format in OPENINGS:
        for begun in ('<tool_call>{"x"', '[TOOL_CALLS]{"x"', '[TOOL_CALLS]f[ARGS]{"x"', '<tool_call>[{"x"'):
            text, num_read = begun * 400, 0
            parser = format.parser(TOOLS)
            events = [*parser.push(text), *parser.finish()]
            assert num_read <= 10 * len(text), (format, begun)
            assert events


def test_a_long_text_is_one_event() -> None:
    parser = OutputParser(RenderedRequest(requests=[], tool_format=Hermes(), tools=TOOLS))
    (event,) = parser.push(OutputDelta("word " * 1000 + "end", finish_reason=FinishReason.STOP))
    assert event == Content("word " * 1000 + "end")
