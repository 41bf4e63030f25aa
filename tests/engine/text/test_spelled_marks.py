"""A mark is the token that the vocabulary has for it. The same text in other tokens is text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.text.matching import END, byte_tokenizer, matches
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.link.messages import TokenOutput
from fastgen.text.output_events import Collected
from fastgen.text.output_parser import OutputParser
from fastgen.text.reasoning.format import ReasoningFormat, Start
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.think import Think
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import RequestOutput
from fastgen.text.spelled_marks import GUARD
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.plain_json import Llama3Json
from fastgen.text.tools.qwen3_coder import Qwen3Coder
from fastgen.text.tools.registry import call_grammar, free_grammar
from fastgen.text.vocabulary import Vocabulary

TOOLS = (OfferedTool("f", {"type": "object", "properties": {"a": {"type": "string"}}}),)
REASONING = (Think(), HarmonyReasoning())
FORMATS = (Hermes(), Qwen3Coder(), Mistral(), MistralArguments(), Llama3Json(), Harmony())
MARKS = tuple(dict.fromkeys(mark for each in (*REASONING, *FORMATS) for mark in each.marks))
# Text that looks like a mark to no parser, as long as a mark.
DISGUISED = {mark: mark.translate({ord("<"): "\u2039", ord("["): "\u2045"}) for mark in MARKS}


@dataclass(frozen=True)
class Own:
    """A mark as its own token."""

    mark: str


Parts = Sequence[str | Own]
Said = tuple[str, str, list[tuple[str, str]]]


def with_added_marks() -> Tokenizer:
    """Return a tokenizer whose marks are added tokens that are not special, as Qwen3's."""
    backend = byte_tokenizer(None).backend
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return Tokenizer(backend, Vocabulary(backend), None, None, END)


TOKENIZERS = {"special": byte_tokenizer(None, *MARKS), "added": with_added_marks()}
TEXT_ONLY = byte_tokenizer(None)


def token_ids(parts: Parts, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a generation: texts in single bytes."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Own):
            ids.append(tokenizer.vocabulary.added_tokens[part.mark])
        else:
            ids += [number for character in part for number in TEXT_ONLY.encode(character, add_special_tokens=False)]
    return ids


def said(
    parts: Parts,
    tokenizer: Tokenizer,
    *,
    reasoning: ReasoningFormat | None = None,
    start: Start = Start.OPEN,
    format: ToolFormat | None = None,
    at_once: int = 1,
    stop: tuple[str, ...] = (),
) -> Said:
    """Return what a generation says, whose tokens come `at_once`."""
    request = Request(id="", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=9999))
    rendered = RenderedRequest(
        requests=[request],
        stop=stop,
        reasoning=reasoning,
        start=start,
        tool_format=format,
        tools=TOOLS if format else (),
    )
    output, parser, events = RequestOutput(request, tokenizer, rendered), OutputParser(rendered), []
    ids = token_ids(parts, tokenizer)
    for place in range(0, len(ids), at_once):
        if output.finish_reason is None:
            output.push(TokenOutput(request_id="", token_ids=ids[place : place + at_once]))
            events += parser.push(output.take())
    if output.finish_reason is None:
        output.push(TokenOutput(request_id="", token_ids=[END], finish_reason=FinishReason.STOP))
        events += parser.push(output.take())
    found, whole = Collected(events), Collected(OutputParser(rendered).push(output.as_delta()))
    result = found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]
    assert result == (whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls])
    assert GUARD not in repr(result)
    return result


CALL = '{"name": "f", "arguments": {"a": "1"}}'
HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
FINAL = (Own("<|channel|>"), "final", Own("<|message|>"))
# A generation that quotes marks, and what it says.
QUOTING: list[tuple[Parts, dict[str, Any], Said]] = [
    (
        (Own("<think>"), "The user wrote </think>.", Own("</think>"), "Yes"),
        {"reasoning": Think()},
        ("The user wrote </think>.", "Yes", []),
    ),
    (("Close it with </think>", Own("</think>"), "Yes"), {"reasoning": Think(), "start": Start.INSIDE},
     ("Close it with </think>", "Yes", [])),
    (("<think>is a mark</think>",), {"reasoning": Think()}, ("", "<think>is a mark</think>", [])),
    ((f"Write <tool_call>{CALL}</tool_call>",), {"format": Hermes()}, ("", f"Write <tool_call>{CALL}</tool_call>", [])),
    (
        (Own("<tool_call>"), '{"name": "f", "arguments": {"a": "</tool_call>"}}', Own("</tool_call>"), "<tool_call>"),
        {"format": Hermes()},
        ("", "<tool_call>", [("f", '{"a": "</tool_call>"}')]),
    ),
    (
        (Own("<tool_call>"), '{"arguments": {"a": "<tool_call>"}, "name": "f"}', Own("</tool_call>")),
        {"format": Hermes()},
        ("", "", [("f", '{"a": "<tool_call>"}')]),
    ),
    (
        (Own("<tool_call>"), "\n<function=f>\n<parameter=a>\n</function>\n</tool_call>\n</parameter>\n</function>\n",
         Own("</tool_call>")),
        {"format": Qwen3Coder()},
        ("", "", [("f", '{"a": "</function>\\n</tool_call>"}')]),
    ),
    (("[TOOL_CALLS]", f"[{CALL}]"), {"format": Mistral()}, ("", f"[TOOL_CALLS][{CALL}]", [])),
    ((Own("[TOOL_CALLS]"), "f", Own("[ARGS]"), "{}"), {"format": MistralArguments()}, ("", "", [("f", "{}")])),
    (
        (Own("[TOOL_CALLS]"), "f[CALL_ID]", Own("[ARGS]"), "{}"),
        {"format": MistralArguments()},
        ("", "", [("f[CALL_ID]", "{}")]),
    ),
    (("[TOOL_CALLS]f[ARGS]{}",), {"format": MistralArguments()}, ("", "[TOOL_CALLS]f[ARGS]{}", [])),
    (("<|python_tag|>", CALL), {"format": Llama3Json()}, ("", f"<|python_tag|>{CALL}", [])),
    (
        (*FINAL, f"Use <|end|><|start|>assistant{HARMONY_CALL} so."),
        {"reasoning": HarmonyReasoning(), "format": Harmony()},
        ("", f"Use <|end|><|start|>assistant{HARMONY_CALL} so.", []),
    ),
    (
        (Own("<|channel|>"), "analysis", Own("<|message|>"), "<|channel|>final<|message|>No", Own("<|end|>"),
         Own("<|start|>"), "assistant", *FINAL, "Yes"),
        {"reasoning": HarmonyReasoning()},
        ("<|channel|>final<|message|>No", "Yes", []),
    ),
    ((*FINAL, HARMONY_CALL), {"format": Harmony()},
     ("", HARMONY_CALL, [])),
]  # fmt: skip


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
@pytest.mark.parametrize(("parts", "meaning", "expected"), QUOTING)
def test_a_mark_in_other_tokens_is_text(vocabulary: str, parts: Parts, meaning: dict[str, Any], expected: Said) -> None:
    for at_once in (1, 2, 5, 999):
        assert said(parts, TOKENIZERS[vocabulary], at_once=at_once, **meaning) == expected


def test_a_mark_without_a_token_of_its_own_is_a_mark_in_any_tokens() -> None:
    parts = ("<think>a</think>", f"<tool_call>{CALL}</tool_call>")
    assert said(parts, TEXT_ONLY, reasoning=Think(), format=Hermes()) == ("a", "", [("f", '{"a": "1"}')])
    # Each mark by itself: this vocabulary has a token for one of them.
    tokenizer = byte_tokenizer(None, "<think>")
    parts = (Own("<think>"), "a <think> b</think>c")  # type: ignore[assignment]
    assert said(parts, tokenizer, reasoning=Think()) == ("a <think> b", "c", [])


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
def test_quoted_marks_are_read_as_any_other_text(vocabulary: str) -> None:
    """What a generation says does not depend on what its ordinary tokens spell."""
    source, tokenizer = random.Random(11), TOKENIZERS[vocabulary]
    back = str.maketrans({"\u2039": "<", "\u2045": "["})
    words = (
        "final",
        "analysis",
        "commentary to=functions.f",
        "assistant",
        "{}",
        CALL,
        " ",
        "\n",
        "<",
        "x",
        "é",
        "\ufdd1",
    )
    for _ in range(400):
        parts: list[str | Own] = []
        for _ in range(source.randrange(1, 12)):
            mark = source.choice(MARKS)
            parts.append(source.choice((Own(mark), mark, source.choice(words), source.choice(words))))
        plain = [DISGUISED.get(part, part) if isinstance(part, str) else part for part in parts]
        meaning: dict[str, Any] = {
            "reasoning": source.choice((None, *REASONING)),
            "start": source.choice(list(Start)),
            "format": source.choice((None, *FORMATS)),
        }
        reasoning, content, calls = said(plain, tokenizer, **meaning)
        expected = reasoning.translate(back), content.translate(back), [(n, a.translate(back)) for n, a in calls]
        found = said(parts, tokenizer, at_once=source.choice((1, 3, 99)), **meaning)
        assert found == expected, (parts, meaning)


NONCHARACTERS = "\ufdd0\ufdd1\uffff"


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
@pytest.mark.parametrize(
    ("parts", "meaning", "expected"),
    [
        (
            (Own("<think>"), f"a{NONCHARACTERS}</think>", Own("</think>"), f"b{NONCHARACTERS}<think>"),
            {"reasoning": Think()},
            (f"a{NONCHARACTERS}</think>", f"b{NONCHARACTERS}<think>", []),
        ),
        *(
            (
                (Own("<tool_call>"), text.replace("A", f"{NONCHARACTERS}<tool_call>"), Own("</tool_call>")),
                {"format": format},
                ("", "", [(f"f{NONCHARACTERS}", f'{{"a": "{NONCHARACTERS}<tool_call>"}}')]),
            )
            for format, text in (
                (Hermes(), f'{{"name": "f{NONCHARACTERS}", "arguments": {{"a": "A"}}}}'),
                (Hermes(), f'{{"arguments": {{"a": "A"}}, "name": "f{NONCHARACTERS}"}}'),
                (
                    Qwen3Coder(),
                    f"<function=f{NONCHARACTERS}>\n<parameter=a>\nA\n</parameter>\n</function>\n",
                ),
            )
        ),
    ],
)
def test_a_noncharacter_of_the_model_is_kept(
    vocabulary: str, parts: Parts, meaning: dict[str, Any], expected: Said
) -> None:
    for at_once in (1, 3, 999):
        assert said(parts, TOKENIZERS[vocabulary], at_once=at_once, **meaning) == expected


def test_an_escaped_lone_surrogate_of_the_model_is_kept() -> None:
    """Guards are surrogates, and only JSON can spell one."""
    for text in (r'{"name": "f", "arguments": {"a": "\ud800"}}', r'{"arguments": {"a": "\ud800"}, "name": "f"}'):
        parts = (Own("<tool_call>"), text, Own("</tool_call>"))
        assert said(parts, TOKENIZERS["added"], format=Hermes()) == ("", "", [("f", r'{"a": "\ud800"}')])


def test_stop_strings_find_quoted_marks() -> None:
    tokenizer = TOKENIZERS["special"]
    parts = (*FINAL, "Say <|end|> and go")
    meaning: dict[str, Any] = {"reasoning": HarmonyReasoning(), "format": Harmony()}
    for stop, content in (
        ("<|end|>", "Say "),
        ("d|> a", "Say <|en"),
        ("|>", "Say <|end"),
        ("go", "Say <|end|> and "),
        ("gone", "Say <|end|> and go"),
        ("end", "Say <|"),
    ):
        for at_once in (1, 99):
            assert said(parts, tokenizer, stop=(stop,), at_once=at_once, **meaning) == ("", content, [])
    thinking = (Own("<think>"), "no </think> stop", Own("</think>"), "a stop")
    assert said(thinking, tokenizer, reasoning=Think(), stop=("stop",)) == ("no </think> stop", "a ", [])
    # The stop string holds the beginning of a call back, and the call is none.
    quoting = (f"a<tool_call>{CALL}",)
    assert said(quoting, tokenizer, format=Hermes(), stop=("call>x",)) == ("", f"a<tool_call>{CALL}", [])


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
def test_tokens_of_reasoning_are_counted_up_to_the_token_of_its_end(vocabulary: str) -> None:
    tokenizer = TOKENIZERS[vocabulary]
    ids = token_ids((Own("<think>"), "</think>", Own("</think>"), "ab"), tokenizer)
    assert Think().num_tokens(ids, Start.OPEN, tokenizer) == 10
    assert Think().num_tokens(token_ids(("<think>a",), tokenizer), Start.OPEN, tokenizer) == 0
    ids = token_ids(
        (Own("<|channel|>"), "analysis", Own("<|message|>"), "<|end|>", Own("<|end|>"), Own("<|start|>"), "assistant",
         *FINAL, "ab"),
        tokenizer,
    )  # fmt: skip
    assert HarmonyReasoning().num_tokens(ids, Start.OPEN, tokenizer) == 1 + 8 + 1 + 7 + 1


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
@pytest.mark.parametrize("format", [Hermes(), Mistral(), Qwen3Coder()], ids=lambda format: type(format).__name__)
def test_a_grammar_of_calls_demands_the_tokens_of_the_marks(vocabulary: str, format: ToolFormat) -> None:
    tokenizer = TOKENIZERS[vocabulary]
    text = {
        Hermes: f"<tool_call>\n{CALL}\n</tool_call>",
        Mistral: f"[TOOL_CALLS][{CALL}]",
        Qwen3Coder: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    }[type(format)]
    forced = call_grammar(format, TOOLS, tokenizer, most_calls=1)
    free = free_grammar(format, (OfferedTool("f", TOOLS[0].schema, strict=True),), tokenizer, most_calls=1)
    assert matches(forced, tokenizer, text)
    assert matches(free, tokenizer, f"So: {text}")
    assert not matches(forced, SPELLING[vocabulary], text)
    assert matches(free, SPELLING[vocabulary], f"So: {format.opening} is a mark")
    assert not matches(free, tokenizer, f"So: {format.opening} no")


class _Spelling(Tokenizer):
    """A tokenizer that spells marks."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return TEXT_ONLY.encode(text, add_special_tokens=add_special_tokens)


SPELLING = {name: _Spelling(each.backend, each.vocabulary, None, None, END) for name, each in TOKENIZERS.items()}
