"""Messages of Harmony (gpt-oss): reasoning, content and calls, however the text is split; grammars, and counts."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from engine.text.generations import output_text
from engine.text.matching import byte_tokenizer, matches
from fastgen.core.request import FinishReason
from fastgen.core.sampling_params import Grammar
from fastgen.settings import ConfigError
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.harmony import MARKS
from fastgen.text.output_events import Collected
from fastgen.text.output_parser import OutputParser
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.registry import reasoning_format
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta
from fastgen.text.tools.format import OfferedTool
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.registry import call_grammar, choose_format, free_grammar

FORMAT = HarmonyReasoning()
TOKENIZER = byte_tokenizer(None, *MARKS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = (OfferedTool("f", SCHEMA), OfferedTool("g", {"type": "object"}))

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

Said = tuple[str, str, list[tuple[str, str]]]


def said(text: str, cuts: list[int], *, start: Start = Start.OPEN, tools: bool = True, thinks: bool = True) -> Said:
    rendered = RenderedRequest(
        requests=[],
        reasoning=FORMAT if thinks else None,
        start=start,
        tool_format=Harmony() if tools else None,
        tools=TOOLS if tools else (),
    )
    parser, edges = OutputParser(rendered), [0, *sorted(cuts), len(text)]
    deltas = [OutputDelta(text[left:right]) for left, right in pairwise(edges)]
    deltas.append(OutputDelta("", finish_reason=FinishReason.STOP))
    found = Collected(event for delta in deltas for event in parser.push(delta))
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


GENERATIONS: list[tuple[str, Said]] = [
    (f"{THOUGHT}{FINAL}Yes.", ("Hm.", "Yes.", [])),
    (f"{FINAL}Yes.", ("", "Yes.", [])),
    (f'{THOUGHT}{CALL}{{"a": 1}}', ("Hm.", "", [("f", '{"a": 1}')])),
    (f'{THOUGHT}{CALL}{{"a": 1}}<|call|>', ("Hm.", "", [("f", '{"a": 1}')])),
    # The recipient behind the role, as templates write earlier calls.
    (f"{THOUGHT} to=functions.g<|channel|>commentary json<|message|>{{}}", ("Hm.", "", [("g", "{}")])),
    # Text before a call, and thoughts before and behind it.
    (
        f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{THOUGHT}{CALL}{{}}",
        ("Hm.\n\nHm.", "I look.", [("f", "{}")]),
    ),
    (f"{THOUGHT}<|channel|>commentary<|message|>A<|end|><|start|>assistant{FINAL}B", ("Hm.", "A\n\nB", [])),
    # Arguments that the model writes badly, and the code of a built-in tool.
    (f'{CALL}\n{{"a": "x\ny"}} so', ("", "", [("f", '{"a": "x\\ny"}')])),
    (f'{CALL}{{"a": [1', ("", "", [("f", '{"a": [1')])),
    ("<|channel|>analysis to=python code<|message|>1 < 2", ("", "", [("python", "1 < 2")])),
    # Headers that are wrong or cut.
    ("Yes, to=f", ("", "Yes, to=f", [])),
    ("t", ("", "t", [])),
    ("<|channel|>fin", ("", "", [])),
    ("<|channel|>analysis<|message|>So", ("So", "", [])),
    (f"<|channel|>analysis<|message|>So<|start|>assistant{FINAL}Yes", ("So", "Yes", [])),
    (f"<|channel|>analysis<|message|>So{FINAL}Yes", ("So", "Yes", [])),
    ("<|message|>Yes", ("", "Yes", [])),
    (f"{FINAL}a <|en", ("", "a <|en", [])),
    (f"{FINAL}Yes.<|return|>", ("", "Yes.", [])),
    # Headers that never end: their mark goes, and the rest is an answer.
    ("<|channel|>" + "x" * 600, ("", "x" * 600, [])),
    ("<|start|>assistant " + "y" * 600, ("", "assistant " + "y" * 600, [])),
    ("<|<|message|>Yes", ("", "<|<|message|>Yes", [])),
    (f"to={'f' * 509}<|message|>Yes", ("", "Yes", [])),
    ("<|channel|>" * 60, ("", "", [])),
    ("<|end|>" * 60 + "Yes", ("", "Yes", [])),
    (" " * 600 + "Yes", ("", " " * 600 + "Yes", [])),
]


@pytest.mark.parametrize(("text", "expected"), GENERATIONS)
def test_messages_are_separated_however_the_text_is_split(text: str, expected: Said) -> None:
    source = random.Random(text)
    assert said(text, []) == expected
    assert said(text, list(range(1, len(text)))) == expected
    for _ in range(20):
        assert said(text, source.choices(range(len(text) + 1), k=3)) == expected


def test_any_sequence_of_marks_and_text_is_read_the_same_way_however_it_is_split() -> None:
    """No sequence may be read without end: the server would stand still."""
    source = random.Random(7)
    for _ in range(300):
        words = (*MARKS, "assistant", "final", "analysis", " to=functions.f", "{}", " ", "x" * 300, "<|", "|>")
        text = "".join(source.choices(words, k=source.randrange(1, 30)))
        whole = said(text, [])
        assert said(text, source.choices(range(len(text) + 1), k=5)) == whole
        assert said(text, list(range(1, len(text)))) == whole


@pytest.mark.parametrize(
    ("piece", "contents"),
    [
        ("<|end|>", []),
        ("<|channel|>", []),
        ("<|start|>assistant", ["assistant"] * 49_971),  # the last 29 may be one unfinished header
        (f"{FINAL}a<|end|>", ["a"] * 50_000),
        (f"{FINAL}<|", ["<|"] * 50_000),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_the_time_grows_with_the_length_of_the_text_only(piece: str, contents: list[str], whole: bool) -> None:
    """With a search of the whole rest at each mark, this takes many minutes."""
    parser = FORMAT.parser(Start.OPEN)
    parts = [parser.push(text) for text in ([piece * 50_000] if whole else [piece] * 50_000)]
    parts.append(parser.finish())
    assert not any(thought for thought, _ in parts)
    assert "".join(content for _, content in parts) == "\n\n".join(contents)


def test_a_call_that_may_not_be_made_is_content() -> None:
    text = f'{THOUGHT}{CALL}{{"a": 1}}'
    content = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    assert said(text, [], tools=False) == ("Hm.", content, [])


def test_without_a_parser_of_reasoning_calls_are_still_found() -> None:
    content = "<|channel|>analysis<|message|>Hm."
    assert said(f"<|channel|>analysis<|message|>Hm.<|end|>{CALL}{{}}", [9, 40], thinks=False) == (
        "",
        content,
        [("f", "{}")],
    )


def test_pieces_are_emitted_as_they_arrive() -> None:
    parser = FORMAT.parser(Start.OPEN)
    assert parser.push("<|channel|>analysis") == ("", "")
    assert parser.push("<|message|>Let") == ("Let", "")
    assert parser.push(" me<|") == (" me", "")
    assert parser.push("end|><|start|>assistant<|channel|>final<|message|>Yes") == ("", "Yes")


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", Start.OPEN),
        ("<|start|>user<|message|>Hi<|end|>", Start.OPEN),
        ("<|start|>assistant<|channel|>analysis<|message|>", Start.INSIDE),
        ("<|start|>assistant<|channel|>analysis<|message|>So", Start.INSIDE),
        ("<|start|>assistant<|channel|>final<|message|>So", Start.AFTER),
        ("no marks", Start.OPEN),
    ],
)
def test_the_end_of_the_prompt_tells_where_a_generation_starts(prompt: str, start: Start) -> None:
    assert FORMAT.start_after(prompt) is start


def test_a_continued_message_is_an_answer() -> None:
    assert FORMAT.start_within("So") is Start.AFTER
    assert said("Yes.", [], start=Start.AFTER) == ("", "Yes.", [])
    assert said(f"so.<|end|><|start|>assistant{FINAL}Yes.", [], start=Start.INSIDE) == ("so.", "Yes.", [])


@pytest.mark.parametrize(
    ("text", "start", "counted"),
    [
        (f"{THOUGHT}{FINAL}Yes.", Start.OPEN, "<|channel|>analysis<|message|>Hm.<|end|>"),
        (f"{FINAL}Yes.", Start.OPEN, ""),
        ("so<|end|>", Start.INSIDE, "so<|end|>"),
        ("<|channel|>analysis<|message|>so", Start.OPEN, "<|channel|>analysis<|message|>so"),
        ("Yes.", Start.AFTER, ""),
        ("<|channel|>analysis to=python<|message|>1", Start.OPEN, ""),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_marks(text: str, start: Start, counted: str) -> None:
    encoded = [TOKENIZER.encode(piece, add_special_tokens=False) for piece in (text, counted)]
    assert FORMAT.num_tokens(encoded[0], start, TOKENIZER) == len(encoded[1])


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        (f"{THOUGHT}{FINAL}No. Yes.", f"{THOUGHT}{FINAL}No"),
        (f'{CALL}{{"a": 1.5}}', f'{CALL}{{"a": 1.5}}'),
        ("Yes. No.", "Yes"),
    ],
)
def test_stop_strings_apply_to_the_answer(text: str, stopped: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for size in (1, 7, 200):
        output = output_text(TOKENIZER, stop=(".",), reasoning=FORMAT, start=Start.OPEN)
        shown = ""
        for place in range(0, len(tokens), size):
            is_last = place + size >= len(tokens)
            shown += output.push(tokens[place : place + size], FinishReason.LENGTH if is_last else None)
            if output.finish_reason is not None:
                break
        assert shown == stopped


def test_the_answer_begins_behind_the_header_of_final() -> None:
    finder = FORMAT.answer_finder(Start.OPEN)
    assert finder.push("<|channel|>fi") == ("<|channel|>fi", "")
    assert finder.push("nal<|message|>a") == ("nal<|message|>", "a")
    assert finder.push("b<|end|>") == ("", "b<|end|>")


def grammar(answer: Grammar | None, start: Start = Start.OPEN, budget: int | None = None, **options: Any) -> Grammar:
    found = FORMAT.grammar(answer, TOKENIZER, start, budget, **{"offers_tools": False, **options})
    assert found is not None
    return found


def test_a_structure_applies_to_the_answer() -> None:
    answer = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    for thoughts in ("", THOUGHT, THOUGHT * 2):
        assert matches(grammar(answer), TOKENIZER, f'{thoughts}{FINAL}{{"a": 1}}')
        assert not matches(grammar(answer), TOKENIZER, f"{thoughts}{FINAL}Yes")
        assert not matches(grammar(answer), TOKENIZER, f'{thoughts}{CALL}{{"a": 1}}')
    assert matches(grammar(answer, Start.INSIDE), TOKENIZER, f'so<|end|><|start|>assistant{FINAL}{{"a": 1}}')
    assert FORMAT.grammar(answer, TOKENIZER, Start.AFTER, None, offers_tools=False) is answer
    assert FORMAT.grammar(None, TOKENIZER, Start.OPEN, None, offers_tools=False) is None


@pytest.mark.parametrize("answer", [None, Grammar(kind="json_schema", text=json.dumps(SCHEMA))], ids=["free", "json"])
def test_a_budget_ends_the_reasoning(answer: Grammar | None) -> None:
    text = f'{FINAL}{{"a": 1}}'
    found = grammar(answer, budget=3)
    assert matches(found, TOKENIZER, f"{THOUGHT}{text}")
    assert matches(found, TOKENIZER, text)
    long = THOUGHT.replace("Hm.", "Hm, no")
    assert not matches(found, TOKENIZER, f"{long}{text}")
    assert not matches(found, TOKENIZER, f"{THOUGHT}{THOUGHT}{text}")
    assert matches(grammar(answer, budget=0), TOKENIZER, text)
    assert not matches(grammar(answer, budget=0), TOKENIZER, f"{THOUGHT}{text}")
    assert matches(grammar(answer, Start.INSIDE, budget=0), TOKENIZER, f"<|end|><|start|>assistant{text}")
    assert not matches(grammar(answer, Start.INSIDE, budget=1), TOKENIZER, f"ab<|end|><|start|>assistant{text}")
    if answer is None:
        assert matches(
            found, TOKENIZER, f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}x"
        )


def test_required_calls_follow_thoughts_and_match_their_schema() -> None:
    calls = call_grammar(Harmony(), TOOLS, TOKENIZER, most_calls=None)
    found = grammar(calls, offers_tools=True)
    assert matches(found, TOKENIZER, f'{THOUGHT}{CALL}{{"a": 1}}')
    assert matches(found, TOKENIZER, f"{CALL.replace('.f', '.g')}{{}}")
    assert not matches(found, TOKENIZER, f"{CALL}{{}}")
    assert not matches(found, TOKENIZER, f"{CALL.replace('.f', '.h')}{{}}")
    assert not matches(found, TOKENIZER, f'{FINAL}{{"a": 1}}')


def test_calls_or_an_answer_that_matches() -> None:
    answer = Grammar(kind="json_schema", text='{"type": "array"}')
    found = grammar(call_grammar(Harmony(), TOOLS, TOKENIZER, most_calls=None, answer=answer), offers_tools=True)
    assert matches(found, TOKENIZER, f'{THOUGHT}{CALL}{{"a": 1}}')
    assert matches(found, TOKENIZER, f"{THOUGHT}{FINAL}[]")
    assert not matches(found, TOKENIZER, f'{THOUGHT}{FINAL}{{"a": 1}}')


def test_strict_calls_or_any_answer() -> None:
    tools = (OfferedTool("f", SCHEMA, strict=True),)
    found = grammar(free_grammar(Harmony(), tools, TOKENIZER, most_calls=None), offers_tools=True)
    assert matches(found, TOKENIZER, f"{THOUGHT}{FINAL}Yes.")
    assert matches(found, TOKENIZER, f'{THOUGHT}{CALL}{{"a": 1}}')
    assert not matches(found, TOKENIZER, f"{THOUGHT}{CALL}{{}}")


def test_the_formats_are_chosen_by_the_template_and_need_the_tokens() -> None:
    template = ChatTemplate("<|start|>assistant<|channel|>analysis<|message|>", {})
    with_tokens, without = byte_tokenizer(template, *MARKS), byte_tokenizer(template, *MARKS[1:])
    assert reasoning_format("auto", with_tokens) == FORMAT
    assert reasoning_format("harmony", TOKENIZER) == FORMAT
    assert reasoning_format("none", with_tokens) is None
    assert isinstance(choose_format("auto", with_tokens), Harmony)
    assert isinstance(choose_format("harmony", TOKENIZER), Harmony)
    for name in ("auto", "harmony"):
        with pytest.raises(ConfigError, match=rf"{name}: .* no special token <\|start\|>.*set it to none"):
            reasoning_format(name, without)
    assert reasoning_format("none", without) is None
