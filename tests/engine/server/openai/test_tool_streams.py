"""A streamed choice and the complete one say the same, however badly the model writes calls and wherever it is cut."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.core.request import FinishReason
from fastgen.server.openai.chat.choices import ChatChunkWriter, chat_choice
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.responses.output import Output
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.think import Think
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.plain_json import Llama3Json, PlainJson
from fastgen.text.tools.qwen3_coder import Qwen3Coder

FORMATS: list[ToolFormat] = [
    Hermes(),
    Llama3Json(),
    PlainJson(),
    Mistral(),
    MistralArguments(),
    Qwen3Coder(),
    Harmony(),
]
OFFERED = tuple(OfferedTool(name, {}) for name in ("f", "g"))
BODY = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
UNUSED: Any = None
Said = tuple[str, str, list[tuple[str, str]], str | None]


def request_for(format: ToolFormat, *, thinks: bool = False, max_calls: int | None = None) -> RenderedRequest:
    reasoning = HarmonyReasoning() if isinstance(format, Harmony) else Think()
    return RenderedRequest(
        requests=[],
        reasoning=reasoning if thinks else None,
        start=Start.OPEN,
        tool_format=format,
        tools=OFFERED,
        max_calls=max_calls,
    )


def output_of(text: str, reason: FinishReason) -> Any:
    return SimpleNamespace(as_delta=lambda: OutputDelta(text, finish_reason=reason), token_ids=[])


def whole(text: str, rendered: RenderedRequest, reason: FinishReason) -> Said:
    choice = chat_choice(0, output_of(text, reason), rendered, BODY, UNUSED)
    calls: Any = choice.message.tool_calls or []
    reasoning: Any = choice.message.reasoning or ""
    written = [(call.function.name, call.function.arguments) for call in calls]
    return reasoning, choice.message.content or "", written, choice.finish_reason


def streamed(pieces: list[str], rendered: RenderedRequest, reason: FinishReason) -> Said:
    writer, output = ChatChunkWriter(0, rendered, BODY, UNUSED), output_of("", reason)
    reasoning, content, calls, last = "", "", list[list[str]](), None
    for place, piece in enumerate(pieces):
        is_last = place == len(pieces) - 1
        for chunk in writer.write(OutputDelta(piece, finish_reason=reason if is_last else None), output):
            reasoning += chunk.delta.reasoning or ""
            content += chunk.delta.content or ""
            for call in chunk.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls)
                    calls.append([call.function.name or "", ""])
                calls[call.index][1] += call.function.arguments
            last = chunk.finish_reason
    return reasoning, content, [(name, arguments) for name, arguments in calls], last


def items(pieces: list[str], rendered: RenderedRequest) -> list[tuple[str, str]]:
    """Return the items of a response whose generation arrives in these pieces."""
    built = Output(rendered)
    for place, piece in enumerate(pieces):
        is_last = place == len(pieces) - 1
        built.add(OutputDelta(piece, finish_reason=FinishReason.STOP if is_last else None))
    built.close("completed")
    written: list[Any] = built.items
    return [
        (item.name, item.arguments) if hasattr(item, "arguments") else ("", item.content[0].text) for item in written
    ]


def cut(text: str, random: Any) -> list[str]:
    pieces = []
    while text:
        size = random.randint(1, min(len(text), 9))
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, ""]


CALL = '{"name": "f", "arguments": {"a": 1}}'
JUNK = ["", " ", "\n", "}", "]", "}}", " } ", "```", "\n```\n", "text", " <b>", "{", "[", '"', "`", "\\u00e9", "é", ","]
# One text per format and fault, as models write them: brackets too many or too few, fences, marks again, words inside.
TEXTS = st.builds(
    "".join,
    st.lists(
        st.sampled_from(
            [
                *JUNK,
                CALL,
                CALL[:-1],
                CALL[:-2],
                CALL + "}",
                '{"arguments": {"b": "}</tool_call>{"}, "name": "g"}',
                '{"name": "f", "parameters": {"u": "\\ud83d\\ude00 \\u007b", "l": [1, {"k": [2]}]}}',
                '{"name": "g", "arguments": "{\\"z\\": 1}"}',
                '{"name": "f", "arguments": {"a": x}}',
                '{"name": "unheard_of", "arguments": {}}',
                *("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<tool_ca", "</tool_"),
                *("[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", '{"a": 1}', "[TOOL_", "[ARGS]", "g[CALL_ID]123456789[ARGS]"),
                *("<|python_tag|>", "<|python", "; "),
                *("<function=f>", "<parameter=a>\n1\n</parameter>", "</function>", "<parameter=b>", "</parameter>"),
                *("```json\n", "```json", "<think>", "</think>"),
                *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|channel|>final<|message|>"),
                *("<|channel|>analysis<|message|>", "<|end|>", "<|call|>", "<|start|>assistant", "<|chan", "<|mess"),
            ]
        ),
        min_size=1,
        max_size=9,
    ),
)


@settings(max_examples=1500, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    text=TEXTS,
    thinks=st.booleans(),
    max_calls=st.sampled_from([None, 1]),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    random=st.randoms(use_true_random=False),
)
def test_a_stream_and_a_complete_choice_say_the_same(
    format: ToolFormat, text: str, thinks: bool, max_calls: int | None, reason: FinishReason, random: Any
) -> None:
    rendered = request_for(format, thinks=thinks, max_calls=max_calls)
    assert streamed(cut(text, random), rendered, reason) == whole(text, rendered, reason)


@settings(max_examples=500, deadline=None)
@given(format=st.sampled_from(FORMATS), text=TEXTS, random=st.randoms(use_true_random=False))
def test_a_streamed_response_has_the_items_of_the_complete_one(format: ToolFormat, text: str, random: Any) -> None:
    rendered = request_for(format, thinks=True)
    assert items(cut(text, random), rendered) == items([text], rendered)


def test_text_before_and_after_a_call_is_two_messages_of_a_response() -> None:
    text = f"Let me see.\n<tool_call>{CALL}</tool_call>\nDone."
    expected = [("", "Let me see."), ("f", '{"a": 1}'), ("", "\nDone.")]
    assert items([text], request_for(FORMATS[0])) == expected
    assert items(list(text), request_for(FORMATS[0])) == expected


ARGUMENTS = '{"a": [1, {"b": "}] </tool_call> [TOOL_CALLS] \\u007d"}]}'
# Per format: what surrounds a call of f with these arguments, its mark, and what may stand in the call's place.
SHAPES = [
    (FORMATS[0], "<tool_call>\n", '{"name": "f", "arguments": %s}', "\n</tool_call>"),
    (FORMATS[0], "<tool_call>", '{"name": "f", "arguments": %s}', ""),
    (FORMATS[0], "<tool_call><tool_call>", '{"name": "f", "arguments": %s}', "</tool_call></tool_call>"),
    (FORMATS[0], "<tool_call>\n```json\n", '{"name": "f", "arguments": %s}', "\n```\n</tool_call>"),
    (FORMATS[0], "<tool_call>[", '{"name": "f", "arguments": %s}', "]</tool_call>"),
    (FORMATS[1], "<|python_tag|>", '{"name": "f", "parameters": %s}', ""),
    (FORMATS[1], "```json\n", '{"name": "f", "parameters": %s}', "\n```"),
    (FORMATS[2], "", '{"name": "f", "arguments": %s}', ""),
    (FORMATS[3], "[TOOL_CALLS] [", '{"name": "f", "arguments": %s}', "]"),
    (FORMATS[4], "[TOOL_CALLS]", "f[ARGS]%s", ""),
]


@pytest.mark.parametrize("fault", ["", "}", "}}", "]", " }\n", "```"])
@pytest.mark.parametrize(("format", "before", "call", "after"), SHAPES)
def test_brackets_too_many_and_marks_never_reach_the_client(
    format: ToolFormat, before: str, call: str, after: str, fault: str
) -> None:
    rendered = request_for(format)
    text = before + call % ARGUMENTS + fault + after
    for pieces in ([text], list(text)):
        _, content, calls, reason = streamed([*pieces, ""], rendered, FinishReason.STOP)
        assert (content, reason) == ("", "tool_calls")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", json.loads(ARGUMENTS))]


@pytest.mark.parametrize(("format", "before", "call", "after"), [shape for shape in SHAPES if shape[3]])
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_brackets_end_neither_the_answer_nor_the_calls(
    format: ToolFormat, before: str, call: str, after: str, missing: int
) -> None:
    arguments = '{"a": {"b": [1]}}'
    written = (call % arguments)[: -missing if call.endswith("}") else len(call)]
    again = f"<tool_call>{CALL}</tool_call>" if format is FORMATS[0] else ""
    text = before + written + after + again
    for pieces in ([text], list(text)):
        _, content, calls, _ = streamed([*pieces, ""], request_for(format), FinishReason.STOP)
        assert content == ""
        assert json.loads(calls[0][1]) == json.loads(arguments)
        assert len(calls) == 1 + bool(again)


@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        (FORMATS[0], f"<tool_call>{CALL} That is all.</tool_call> Bye.", " That is all. Bye."),
        (FORMATS[0], f"```\n<tool_call>{CALL}</tool_call>\n```", "```\n```"),
        (FORMATS[0], f"<tool_call>{CALL}</tool_call>\nClose with </tool_call>.", "\nClose with </tool_call>."),
        (FORMATS[1], '{"name": "f", "parameters": {"a": 1}}} I called it.', " I called it."),
        (FORMATS[4], '[TOOL_CALLS]f[ARGS]{"a": 1}} Done.', " Done."),
        (
            FORMATS[5],
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\nDone</tool_call> Bye",
            "\nDone Bye",
        ),
    ],
)
def test_text_after_a_call_is_content_without_the_calls_marks(format: ToolFormat, text: str, content: str) -> None:
    for pieces in ([text], list(text)):
        _, shown, calls, _ = streamed([*pieces, ""], request_for(format), FinishReason.STOP)
        assert (shown, [json.loads(arguments) for _, arguments in calls]) == (content, [{"a": 1}]) or (
            format is FORMATS[5] and (shown, calls) == (content, [("f", '{"a": "1"}')])
        )
